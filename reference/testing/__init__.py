"""What the tests of all tiers share: small models, seeded inputs, error metrics. No pytest in here."""
