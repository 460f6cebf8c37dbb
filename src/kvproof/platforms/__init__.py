"""What each platform declares and what kvproof stands in for there, with the reason why the layout cannot notice."""
