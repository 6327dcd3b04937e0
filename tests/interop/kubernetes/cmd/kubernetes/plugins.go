package main

import (
	"time"

	"k8s.io/kubernetes/pkg/kubelet/pluginmanager/cache"

	"nodedock/interop/kubernetes/internal/node"
)

// reported is a plugin handler whose calls are events.
type reported struct {
	cache.PluginHandler
	kind string
}

func (r reported) RegisterPlugin(name, endpoint string, versions []string, timeout *time.Duration) error {
	err := r.PluginHandler.RegisterPlugin(name, endpoint, versions, timeout)
	event := map[string]any{"event": "registered", "kind": r.kind, "name": name, "endpoint": endpoint, "versions": versions}
	if err != nil {
		event["event"], event["error"] = "refused", err.Error()
	}
	node.Emit(event)
	return err
}

func (r reported) DeRegisterPlugin(name, endpoint string) {
	r.PluginHandler.DeRegisterPlugin(name, endpoint)
	node.Emit(map[string]any{"event": "deregistered", "kind": r.kind, "name": name, "endpoint": endpoint})
}
