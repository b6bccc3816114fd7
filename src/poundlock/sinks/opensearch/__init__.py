"""OpenSearch and Elasticsearch."""
