"""What runs beside the model, on every rank."""
