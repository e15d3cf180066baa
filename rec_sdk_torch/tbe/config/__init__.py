"""Configuration of tables: configs, lifecycle rules, cache sizes and optimizers. Imports no other room of tbe."""
