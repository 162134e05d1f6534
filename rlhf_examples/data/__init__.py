"""From records to tokens."""
