package main

import (
	"context"
	"fmt"
	"time"

	v1 "k8s.io/api/core/v1"
	kubecontainer "k8s.io/kubernetes/pkg/kubelet/container"

	"nodedock/interop/kubernetes/internal/node"
)

// command is what a test asks of the kubelet, about one pod.
type command struct {
	ID        uint64 `json:"id"`
	Do        string `json:"do"`
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	// Container is that of "allocate" and "start".
	Container string `json:"container"`
}

// answer carries a command out. The time is that of the manager, without the wait for the pod to be bound to the node.
func (k *managers) answer(ctx context.Context, asked command) {
	answer := map[string]any{"event": "answer", "id": asked.ID, "do": asked.Do}
	pod, err := k.pods.WhenBound(ctx, asked.Namespace, asked.Pod)
	began := time.Now()
	if err == nil {
		answer["result"], err = k.carryOut(ctx, asked, pod)
	}
	answer["us"] = time.Since(began).Microseconds()
	if err != nil {
		answer["error"] = err.Error()
	}
	node.Emit(answer)
}

func (k *managers) carryOut(ctx context.Context, asked command, pod *v1.Pod) (any, error) {
	switch asked.Do {
	case "bound":
		return nil, nil
	case "prepare":
		return k.prepare(ctx, pod)
	case "unprepare":
		return nil, k.claims.UnprepareResources(ctx, pod)
	case "allocate":
		// A kubelet admits one pod after the other, and the manager relies on it.
		k.admission.Lock()
		defer k.admission.Unlock()
		return k.onContainer(pod, asked.Container, func(container *v1.Container) (any, error) {
			return nil, k.devices.Allocate(pod, container)
		})
	case "start":
		return k.onContainer(pod, asked.Container, func(container *v1.Container) (any, error) {
			return k.runOptions(ctx, pod, container)
		})
	case "health":
		return k.health(pod), nil
	}
	return nil, fmt.Errorf("no command %q", asked.Do)
}

// prepare returns the CDI devices of each container.
func (k *managers) prepare(ctx context.Context, pod *v1.Pod) (any, error) {
	if err := k.claims.PrepareResources(ctx, pod); err != nil {
		return nil, err
	}
	containers := map[string][]string{}
	for i := range pod.Spec.Containers {
		container := &pod.Spec.Containers[i]
		resources, err := k.claims.GetResources(pod, container)
		if err != nil {
			return nil, err
		}
		containers[container.Name] = names(resources.CDIDevices)
	}
	return containers, nil
}

func (k *managers) onContainer(pod *v1.Pod, name string, do func(*v1.Container) (any, error)) (any, error) {
	container, err := node.ContainerOf(pod, name)
	if err != nil {
		return nil, err
	}
	return do(container)
}

// runOptions is what a kubelet asks for when it starts a container; it calls PreStartContainer.
func (k *managers) runOptions(ctx context.Context, pod *v1.Pod, container *v1.Container) (any, error) {
	options, err := k.devices.GetDeviceRunContainerOptions(ctx, pod, container)
	if err != nil || options == nil {
		return nil, err
	}
	env := map[string]string{}
	for _, variable := range options.Envs {
		env[variable.Name] = variable.Value
	}
	return map[string]any{"cdi": names(options.CDIDevices), "env": env}, nil
}

func names(devices []kubecontainer.CDIDevice) []string {
	all := []string{}
	for _, device := range devices {
		all = append(all, device.Name)
	}
	return all
}

// health is what a kubelet writes into the status of the pod's containers about their devices.
func (k *managers) health(pod *v1.Pod) any {
	status := pod.Status.DeepCopy()
	status.ContainerStatuses = nil
	for _, container := range pod.Spec.Containers {
		status.ContainerStatuses = append(status.ContainerStatuses, v1.ContainerStatus{Name: container.Name})
	}
	k.claims.UpdateAllocatedResourcesStatus(pod, status)
	k.devices.UpdateAllocatedResourcesStatus(pod, status)
	resources := map[string][]v1.ResourceStatus{}
	for _, container := range status.ContainerStatuses {
		resources[container.Name] = container.AllocatedResourcesStatus
	}
	return resources
}
