"""Communication between ranks: process groups, collectives, their transports, and the watch that finds failed ranks."""
