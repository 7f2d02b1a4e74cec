"""Where jobs and tenants are kept: SQLite by default, PostgreSQL when that is outgrown."""
