"""What other arena sizes would hit, from the traffic; and recordings of the traffic."""
