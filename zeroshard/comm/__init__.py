"""All that travels between ranks: process groups, collectives, their transports, and the watch over them."""
