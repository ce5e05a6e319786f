"""What all tests share: the services that some of them run against."""

pytest_plugins = ["services.etcd", "services.postgres"]
