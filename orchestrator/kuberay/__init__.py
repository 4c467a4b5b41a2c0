"""Manifests for KubeRay: built from deploy/kuberay, filled from a configuration, and checked offline."""
