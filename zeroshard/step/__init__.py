"""What an optimizer step does with them: what ranks agree on, and the steppers."""
