package main

import (
	"context"
	"encoding/json"
	"os"
	"sort"
	"sync"

	"google.golang.org/grpc"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"
	registerv1 "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// event is one line on standard output.
type event struct {
	// "started", "stopped", or "call".
	Event string `json:"event"`
	// The UID of --rolling-update-uid.
	Instance string `json:"instance,omitempty"`
	PID      int    `json:"pid"`
	// Of a call: the gRPC method, the claims in the order of the request, and the error of the whole call.
	Method string       `json:"method,omitempty"`
	Claims []claimEvent `json:"claims,omitempty"`
	Error  string       `json:"error,omitempty"`
	// Of NotifyRegistrationStatus.
	Registered        *bool  `json:"registered,omitempty"`
	RegistrationError string `json:"registrationError,omitempty"`
}

type claimEvent struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	UID       string `json:"uid"`
	// The response.
	Error string   `json:"error,omitempty"`
	CDI   []string `json:"cdi,omitempty"`
}

// recorder writes events.
type recorder struct {
	instance string
	mutex    sync.Mutex
}

func (r *recorder) write(e event) {
	e.Instance, e.PID = r.instance, os.Getpid()
	r.mutex.Lock()
	defer r.mutex.Unlock()
	// Standard output needs no reader.
	_ = json.NewEncoder(os.Stdout).Encode(e)
}

// call records each call of every service of the helper.
func (r *recorder) call(
	ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler,
) (any, error) {
	response, err := handler(ctx, request)
	e := event{Event: "call", Method: info.FullMethod}
	if err != nil {
		e.Error = err.Error()
	}
	switch request := request.(type) {
	case *registerv1.RegistrationStatus:
		e.Registered, e.RegistrationError = &request.PluginRegistered, request.Error
	case *drav1.NodePrepareResourcesRequest:
		answers, _ := response.(*drav1.NodePrepareResourcesResponse)
		e.Claims = prepared(request.Claims, answers.GetClaims())
	case *drav1.NodeUnprepareResourcesRequest:
		answers, _ := response.(*drav1.NodeUnprepareResourcesResponse)
		e.Claims = unprepared(request.Claims, answers.GetClaims())
	}
	r.write(e)
	return response, err
}

func prepared(claims []*drav1.Claim, answers map[string]*drav1.NodePrepareResourceResponse) []claimEvent {
	var events []claimEvent
	for _, claim := range claims {
		e := claimEvent{Namespace: claim.Namespace, Name: claim.Name, UID: claim.Uid}
		answer := answers[claim.Uid]
		e.Error = answer.GetError()
		for _, device := range answer.GetDevices() {
			e.CDI = append(e.CDI, device.CdiDeviceIds...)
		}
		sort.Strings(e.CDI)
		events = append(events, e)
	}
	return events
}

func unprepared(claims []*drav1.Claim, answers map[string]*drav1.NodeUnprepareResourceResponse) []claimEvent {
	var events []claimEvent
	for _, claim := range claims {
		e := claimEvent{Namespace: claim.Namespace, Name: claim.Name, UID: claim.Uid}
		e.Error = answers[claim.Uid].GetError()
		events = append(events, e)
	}
	return events
}
