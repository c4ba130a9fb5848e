"""What builds the documentation's site (mkdocs.yml) and writes the pages that are generated."""
