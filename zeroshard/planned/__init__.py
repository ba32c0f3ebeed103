"""What is planned before anything is allocated: a model under a plan, in bytes of one rank."""
