// Parts of Kubernetes, each as a process of its own: the API server with its store, the scheduler with the claim controller, and those
// managers of a kubelet that meet plugins. Each ends when its standard input does, so that nothing outlives the test that started it.
package main

import (
	"fmt"
	"os"
)

func main() {
	parts := map[string]func([]string) error{"api-server": apiServer, "controllers": controllers, "kubelet": kubelet}
	if len(os.Args) < 2 || parts[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "usage: kubernetes api-server|controllers|kubelet [FLAGS]")
		os.Exit(2)
	}
	if err := parts[os.Args[1]](os.Args[2:]); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", os.Args[1], err)
		os.Exit(1)
	}
}
