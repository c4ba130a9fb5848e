"""What commands print: tables, findings, and reports of measurements."""
