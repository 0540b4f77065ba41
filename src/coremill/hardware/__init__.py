"""What the machine is: probed facts, measured rates, the AWS table."""
