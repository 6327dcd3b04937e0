package node

import (
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

// ClientOf is a client of the API server that a file describes, with at most so many requests per second and at once.
func ClientOf(kubeconfig string, perSecond float32, burst int) (*kubernetes.Clientset, error) {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return nil, err
	}
	config.QPS, config.Burst = perSecond, burst
	return kubernetes.NewForConfig(config)
}
