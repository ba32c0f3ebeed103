"""The watch: finds ranks that have failed, stopped or left, or that wait for each other, and ends all others."""
