package main

import (
	"context"
	"net"
	"os"

	"google.golang.org/grpc"
	v1 "k8s.io/api/core/v1"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/kubernetes/pkg/kubelet/apis/podresources"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/dra"

	"nodedock/interop/kubernetes/internal/node"
)

// resourcesOfPods joins the managers to what the pod-resources API asks for. There are no managers of processors and memory.
type resourcesOfPods struct {
	devices *devicemanager.ManagerImpl
	claims  *dra.Manager
}

func servePodResources(ctx context.Context, socket string, pods *node.Pods, resources resourcesOfPods) error {
	if err := os.Remove(socket); err != nil && !os.IsNotExist(err) {
		return err
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	podresourcesapi.RegisterPodResourcesListerServer(server, podresources.NewV1PodResourcesServer(ctx, podresources.PodResourcesProviders{
		Pods: pods, Devices: resources, Cpus: resources, Memory: resources, DynamicResources: resources,
	}))
	go func() { _ = server.Serve(listener) }()
	return nil
}

func (r resourcesOfPods) UpdateAllocatedDevices() { r.devices.UpdateAllocatedDevices() }

func (r resourcesOfPods) GetDevices(podUID, container string) []*podresourcesapi.ContainerDevices {
	return containerDevices(r.devices.GetDevices(podUID, container))
}

func (r resourcesOfPods) GetAllocatableDevices() []*podresourcesapi.ContainerDevices {
	return containerDevices(r.devices.GetAllocatableDevices())
}

func containerDevices(instances devicemanager.ResourceDeviceInstances) []*podresourcesapi.ContainerDevices {
	var all []*podresourcesapi.ContainerDevices
	for resource, devices := range instances {
		for id := range devices {
			all = append(all, &podresourcesapi.ContainerDevices{ResourceName: resource, DeviceIds: []string{id}})
		}
	}
	return all
}

func (r resourcesOfPods) GetCPUs(string, string) []int64 { return nil }

func (r resourcesOfPods) GetAllocatableCPUs() []int64 { return nil }

func (r resourcesOfPods) GetMemory(string, string) []*podresourcesapi.ContainerMemory { return nil }

func (r resourcesOfPods) GetAllocatableMemory() []*podresourcesapi.ContainerMemory { return nil }

func (r resourcesOfPods) GetDynamicResources(pod *v1.Pod, container *v1.Container) []*podresourcesapi.DynamicResource {
	claims, err := r.claims.GetContainerClaimInfos(pod, container)
	if err != nil {
		return nil
	}
	var all []*podresourcesapi.DynamicResource
	for _, claim := range claims {
		resource := &podresourcesapi.DynamicResource{ClaimName: claim.ClaimName, ClaimNamespace: claim.Namespace}
		for driver, state := range claim.DriverState {
			for _, device := range state.Devices {
				found := &podresourcesapi.ClaimResource{
					DriverName: driver, PoolName: device.PoolName, DeviceName: device.DeviceName, ShareId: (*string)(device.ShareID),
				}
				for _, id := range device.CDIDeviceIDs {
					found.CdiDevices = append(found.CdiDevices, &podresourcesapi.CDIDevice{Name: id})
				}
				resource.ClaimResources = append(resource.ClaimResources, found)
			}
		}
		all = append(all, resource)
	}
	return all
}
