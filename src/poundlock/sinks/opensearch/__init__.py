"""What the OpenSearch sink is made of: bulk requests out of columns, and how they are sent."""
