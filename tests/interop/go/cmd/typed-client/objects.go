package main

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"
)

const (
	namespace = "default"
	driver    = "typed.example.com"
)

var moment = time.Unix(1_700_000_000, 0).UTC()

func meta(in string) metav1.ObjectMeta {
	labels := map[string]string{"example.com/by": "typed-client"}
	return metav1.ObjectMeta{Name: "typed", Namespace: in, Labels: labels, Annotations: map[string]string{"empty": ""}}
}

// label changes what every object has.
func label[T object](of T) {
	of.SetLabels(map[string]string{"example.com/changed": "true"})
}

func exerciseAll(ctx context.Context, clients *kubernetes.Clientset) error {
	core, resources := clients.CoreV1(), clients.ResourceV1()
	for _, next := range []func() error{
		func() error {
			return exercise(ctx, "DeviceClass", resources.DeviceClasses(), deviceClass(), label, nil)
		},
		func() error {
			return exercise(ctx, "ResourceClaim", resources.ResourceClaims(namespace), claim(), label, allocate)
		},
		func() error {
			return exercise(ctx, "ResourceClaimTemplate", resources.ResourceClaimTemplates(namespace), template(), label, nil)
		},
		func() error {
			return exercise(ctx, "ResourceSlice", resources.ResourceSlices(), slice(), addDevice, nil)
		},
		func() error { return exercise(ctx, "Pod", core.Pods(namespace), pod(), changeImage, runPod) },
		func() error { return exercise(ctx, "Node", core.Nodes(), node(), label, nodeStatus) },
		func() error {
			return exercise(ctx, "Namespace", core.Namespaces(), &corev1.Namespace{ObjectMeta: meta("")}, label, nil)
		},
		func() error { return exercise(ctx, "Event", core.Events(namespace), coreEvent(), label, nil) },
		func() error {
			return exercise(ctx, "Event.events.k8s.io", clients.EventsV1().Events(namespace), event(), label, nil)
		},
	} {
		if err := next(); err != nil {
			return err
		}
	}
	return nil
}

func parameters() *resourcev1.OpaqueDeviceConfiguration {
	raw := runtime.RawExtension{Raw: []byte(`{"mode":"fast","list":[1,{"a":null}]}`)}
	return &resourcev1.OpaqueDeviceConfiguration{Driver: driver, Parameters: raw}
}

func selectors() []resourcev1.DeviceSelector {
	expression := `device.driver == "` + driver + `" && device.attributes["` + driver + `"].index > 0`
	return []resourcev1.DeviceSelector{{CEL: &resourcev1.CELDeviceSelector{Expression: expression}}}
}

func deviceClass() *resourcev1.DeviceClass {
	config := resourcev1.DeviceClassConfiguration{DeviceConfiguration: resourcev1.DeviceConfiguration{Opaque: parameters()}}
	return &resourcev1.DeviceClass{
		ObjectMeta: meta(""),
		Spec:       resourcev1.DeviceClassSpec{Selectors: selectors(), Config: []resourcev1.DeviceClassConfiguration{config}},
	}
}

func claimSpec() resourcev1.ResourceClaimSpec {
	exactly := resourcev1.DeviceRequest{Name: "one", Exactly: &resourcev1.ExactDeviceRequest{
		DeviceClassName: "typed", Selectors: selectors(), AllocationMode: resourcev1.DeviceAllocationModeExactCount, Count: 1,
		Tolerations: []resourcev1.DeviceToleration{{
			Key: "example.com/busy", Operator: resourcev1.DeviceTolerationOpExists,
			Effect: resourcev1.DeviceTaintEffectNoExecute, TolerationSeconds: ptr.To(int64(0)),
		}},
		Capacity: &resourcev1.CapacityRequirements{
			Requests: map[resourcev1.QualifiedName]resource.Quantity{"memory": resource.MustParse("1Gi")},
		},
	}}
	alternatives := resourcev1.DeviceRequest{Name: "other", FirstAvailable: []resourcev1.DeviceSubRequest{
		{Name: "a", DeviceClassName: "typed", AllocationMode: resourcev1.DeviceAllocationModeAll},
		{Name: "b", DeviceClassName: "typed", AllocationMode: resourcev1.DeviceAllocationModeExactCount, Count: 2},
	}}
	attribute := resourcev1.FullyQualifiedName(driver + "/numa")
	config := resourcev1.DeviceConfiguration{Opaque: parameters()}
	return resourcev1.ResourceClaimSpec{Devices: resourcev1.DeviceClaim{
		Requests:    []resourcev1.DeviceRequest{exactly, alternatives},
		Constraints: []resourcev1.DeviceConstraint{{Requests: []string{"one"}, MatchAttribute: &attribute}},
		Config:      []resourcev1.DeviceClaimConfiguration{{Requests: []string{"one"}, DeviceConfiguration: config}},
	}}
}

func claim() *resourcev1.ResourceClaim {
	return &resourcev1.ResourceClaim{ObjectMeta: meta(namespace), Spec: claimSpec()}
}

func template() *resourcev1.ResourceClaimTemplate {
	return &resourcev1.ResourceClaimTemplate{ObjectMeta: meta(namespace), Spec: resourcev1.ResourceClaimTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"of": "template"}}, Spec: claimSpec(),
	}}
}

func allocate(claim *resourcev1.ResourceClaim) {
	result := func(request, device string) resourcev1.DeviceRequestAllocationResult {
		return resourcev1.DeviceRequestAllocationResult{Request: request, Driver: driver, Pool: "pool", Device: device}
	}
	claim.Status.Allocation = &resourcev1.AllocationResult{
		Devices: resourcev1.DeviceAllocationResult{
			Results: []resourcev1.DeviceRequestAllocationResult{result("one", "d-0"), result("other/b", "d-1")},
			Config: []resourcev1.DeviceAllocationConfiguration{{
				Source: resourcev1.AllocationConfigSourceClaim, Requests: []string{"one"},
				DeviceConfiguration: resourcev1.DeviceConfiguration{Opaque: parameters()},
			}},
		},
		NodeSelector: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
			MatchFields: []corev1.NodeSelectorRequirement{
				{Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: []string{"elsewhere"}},
			},
		}}},
	}
	claim.Status.Devices = []resourcev1.AllocatedDeviceStatus{{
		Driver: driver, Pool: "pool", Device: "d-0",
		Conditions: []metav1.Condition{{
			Type: "Ready", Status: metav1.ConditionTrue, Reason: "Typed", Message: "é", LastTransitionTime: metav1.NewTime(moment),
		}},
		NetworkData: &resourcev1.NetworkDeviceData{InterfaceName: "eth0", IPs: []string{"10.0.0.1/24"}},
	}}
}

func device(name string) resourcev1.Device {
	return resourcev1.Device{
		Name: name,
		Attributes: map[resourcev1.QualifiedName]resourcev1.DeviceAttribute{
			"index":   {IntValue: ptr.To(int64(0))},
			"model":   {StringValue: ptr.To("a100")},
			"healthy": {BoolValue: ptr.To(false)},
			"version": {VersionValue: ptr.To("1.2.3")},
		},
		Capacity: map[resourcev1.QualifiedName]resourcev1.DeviceCapacity{"memory": {Value: resource.MustParse("80Gi")}},
		Taints: []resourcev1.DeviceTaint{{
			Key: "example.com/busy", Effect: resourcev1.DeviceTaintEffectNoSchedule, TimeAdded: ptr.To(metav1.NewTime(moment)),
		}},
	}
}

func slice() *resourcev1.ResourceSlice {
	return &resourcev1.ResourceSlice{ObjectMeta: meta(""), Spec: resourcev1.ResourceSliceSpec{
		Driver: driver, NodeName: ptr.To("elsewhere"), Devices: []resourcev1.Device{device("d-0")},
		Pool: resourcev1.ResourcePool{Name: "pool", Generation: 1, ResourceSliceCount: 1},
	}}
}

func addDevice(slice *resourcev1.ResourceSlice) {
	slice.Spec.Pool.Generation++
	slice.Spec.Devices = append(slice.Spec.Devices, device("d-1"))
}

func pod() *corev1.Pod {
	probe := corev1.Probe{ProbeHandler: corev1.ProbeHandler{
		HTTPGet: &corev1.HTTPGetAction{Path: "/healthz", Port: intstr.FromString("http"), Scheme: corev1.URISchemeHTTP},
	}}
	return &corev1.Pod{ObjectMeta: meta(namespace), Spec: corev1.PodSpec{
		NodeName:      "elsewhere",
		RestartPolicy: corev1.RestartPolicyNever,
		Containers: []corev1.Container{{
			Name: "main", Image: "pause:3.10", Command: []string{"/pause"},
			Ports:         []corev1.ContainerPort{{Name: "http", ContainerPort: 80, Protocol: corev1.ProtocolTCP}},
			Env:           []corev1.EnvVar{{Name: "A", Value: "1"}},
			LivenessProbe: &probe,
			Resources: corev1.ResourceRequirements{
				Limits: corev1.ResourceList{"example.com/gpu": resource.MustParse("1")},
				Claims: []corev1.ResourceClaim{{Name: "gpu", Request: "one"}},
			},
			VolumeMounts: []corev1.VolumeMount{{Name: "scratch", MountPath: "/scratch"}},
		}},
		ResourceClaims: []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: ptr.To("nosuch")}},
		Volumes: []corev1.Volume{
			{Name: "scratch", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
		},
	}}
}

func changeImage(pod *corev1.Pod) {
	pod.Spec.Containers[0].Image = "pause:3.11"
}

func runPod(pod *corev1.Pod) {
	pod.Status.Phase = corev1.PodRunning
	pod.Status.StartTime = ptr.To(metav1.NewTime(moment))
	pod.Status.ContainerStatuses = []corev1.ContainerStatus{{
		Name: "main", Ready: true, Image: "pause:3.11", ImageID: "sha256:0",
		State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: metav1.NewTime(moment)}},
	}}
}

func node() *corev1.Node {
	taint := corev1.Taint{Key: "example.com/maintenance", Effect: corev1.TaintEffectNoSchedule}
	return &corev1.Node{ObjectMeta: meta(""), Spec: corev1.NodeSpec{Unschedulable: true, Taints: []corev1.Taint{taint}}}
}

func nodeStatus(node *corev1.Node) {
	node.Status.Capacity = corev1.ResourceList{"cpu": resource.MustParse("1500m"), "memory": resource.MustParse("8Gi")}
	node.Status.Conditions = []corev1.NodeCondition{{
		Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "Typed", LastTransitionTime: metav1.NewTime(moment),
	}}
}

func coreEvent() *corev1.Event {
	return &corev1.Event{
		ObjectMeta:     meta(namespace),
		InvolvedObject: corev1.ObjectReference{Kind: "Pod", Namespace: namespace, Name: "typed", APIVersion: "v1"},
		Reason:         "Tried", Message: "as a typed client does", Type: corev1.EventTypeNormal, Count: 3,
		Source:         corev1.EventSource{Component: "typed-client"},
		FirstTimestamp: metav1.NewTime(moment), LastTimestamp: metav1.NewTime(moment.Add(time.Hour)),
	}
}

func event() *eventsv1.Event {
	return &eventsv1.Event{
		ObjectMeta: meta(namespace), EventTime: metav1.NewMicroTime(time.Now()),
		Regarding: corev1.ObjectReference{Kind: "Pod", Namespace: namespace, Name: "typed", APIVersion: "v1"},
		Reason:    "Tried", Note: "as a typed client does", Type: corev1.EventTypeNormal, Action: "Try",
		ReportingController: "example.com/typed-client", ReportingInstance: "one",
	}
}
