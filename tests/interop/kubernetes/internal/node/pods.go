package node

import (
	"context"
	"fmt"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	podutil "k8s.io/kubernetes/pkg/api/v1/pod"
)

// Pods are the pods that are bound to the node. It is a kubelet's source of pods too.
type Pods struct {
	informer cache.SharedIndexInformer
	lister   corelisters.PodLister
	// known are all pods that a command was about: a kubelet unprepares a pod that was deleted by force too.
	known sync.Map
}

func WatchPods(ctx context.Context, client kubernetes.Interface, node string) *Pods {
	ofNode := func(options *metav1.ListOptions) {
		options.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", node).String()
	}
	factory := informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithTweakListOptions(ofNode))
	pods := &Pods{informer: factory.Core().V1().Pods().Informer(), lister: factory.Core().V1().Pods().Lister()}
	factory.Start(ctx.Done())
	return pods
}

func (p *Pods) AddSource(string) {}

func (p *Pods) AllReady() bool { return p.informer.HasSynced() }

func (p *Pods) GetPods() []*v1.Pod {
	var pods []*v1.Pod
	for _, object := range p.informer.GetStore().List() {
		pods = append(pods, object.(*v1.Pod))
	}
	return pods
}

func (p *Pods) GetActivePods() []*v1.Pod {
	var active []*v1.Pod
	for _, pod := range p.GetPods() {
		if !podutil.IsPodTerminal(pod) {
			active = append(active, pod)
		}
	}
	return active
}

func (p *Pods) GetPodByName(namespace, name string) (*v1.Pod, bool) {
	pod, err := p.lister.Pods(namespace).Get(name)
	return pod, err == nil
}

// WhenBound returns a pod when it is bound to this node.
func (p *Pods) WhenBound(ctx context.Context, namespace, name string) (*v1.Pod, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		if pod, found := p.GetPodByName(namespace, name); found {
			p.known.Store(namespace+"/"+name, pod)
			return pod, nil
		}
		if pod, found := p.known.Load(namespace + "/" + name); found {
			return pod.(*v1.Pod), nil
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("pod %s/%s is not bound to this node: %w", namespace, name, ctx.Err())
		case <-time.After(5 * time.Millisecond):
		}
	}
}

func ContainerOf(pod *v1.Pod, name string) (*v1.Container, error) {
	for i := range pod.Spec.Containers {
		if pod.Spec.Containers[i].Name == name {
			return &pod.Spec.Containers[i], nil
		}
	}
	return nil, fmt.Errorf("pod %s/%s has no container %q", pod.Namespace, pod.Name, name)
}
