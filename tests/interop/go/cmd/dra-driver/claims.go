package main

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"os"
	"sync"

	"google.golang.org/grpc"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"
)

// claimServer is the part of an API server that the helper needs: it serves claims.
type claimServer struct {
	driver, pool, request string

	mutex sync.Mutex
	// Claims by namespace and name. Nil: there is no file, and every claim exists.
	known map[types.NamespacedName]*resourceapi.ResourceClaim
	// UIDs of generated claims, as the caller expects them.
	uids map[types.NamespacedName]types.UID
}

// load reads the claims of a file, if one is given.
func (s *claimServer) load(file string) error {
	s.uids = make(map[types.NamespacedName]types.UID)
	if file == "" {
		return nil
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var claims []*resourceapi.ResourceClaim
	if err := json.Unmarshal(text, &claims); err != nil {
		return err
	}
	s.known = make(map[types.NamespacedName]*resourceapi.ResourceClaim, len(claims))
	for _, claim := range claims {
		s.known[types.NamespacedName{Namespace: claim.Namespace, Name: claim.Name}] = claim
	}
	return nil
}

// start listens on a free port of this machine and returns the address.
func (s *claimServer) start() (string, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims/{name}", s.get)
	mux.HandleFunc("/", notFound)
	go func() { _ = http.Serve(listener, mux) }()
	return "http://" + listener.Addr().String(), nil
}

func (s *claimServer) get(w http.ResponseWriter, r *http.Request) {
	key := types.NamespacedName{Namespace: r.PathValue("namespace"), Name: r.PathValue("name")}
	claim := s.find(key)
	if claim == nil {
		notFound(w, r)
		return
	}
	claim.TypeMeta = metav1.TypeMeta{APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceClaim"}
	answer(w, http.StatusOK, claim)
}

func (s *claimServer) find(key types.NamespacedName) *resourceapi.ResourceClaim {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if s.known != nil {
		return s.known[key].DeepCopy()
	}
	return s.makeUp(key)
}

// makeUp generates a claim with one device, which has the claim's name.
func (s *claimServer) makeUp(key types.NamespacedName) *resourceapi.ResourceClaim {
	request := resourceapi.DeviceRequest{
		Name:    s.request,
		Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: s.driver},
	}
	result := resourceapi.DeviceRequestAllocationResult{
		Request: request.Name, Driver: s.driver, Pool: s.pool, Device: key.Name,
	}
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name, UID: s.uids[key]},
		Spec: resourceapi.ResourceClaimSpec{
			Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{request}},
		},
		Status: resourceapi.ResourceClaimStatus{
			Allocation: &resourceapi.AllocationResult{
				Devices: resourceapi.DeviceAllocationResult{
					Results: []resourceapi.DeviceRequestAllocationResult{result},
				},
			},
		},
	}
}

// learn records the UIDs of the claims in a call, before the helper reads them.
func (s *claimServer) learn(
	ctx context.Context, request any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler,
) (any, error) {
	if prepare, ok := request.(*drav1.NodePrepareResourcesRequest); ok {
		s.mutex.Lock()
		for _, claim := range prepare.Claims {
			s.uids[types.NamespacedName{Namespace: claim.Namespace, Name: claim.Name}] = types.UID(claim.Uid)
		}
		s.mutex.Unlock()
	}
	return handler(ctx, request)
}

func notFound(w http.ResponseWriter, r *http.Request) {
	answer(w, http.StatusNotFound, metav1.Status{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"},
		Status:   metav1.StatusFailure,
		Reason:   metav1.StatusReasonNotFound,
		Code:     http.StatusNotFound,
		Message:  r.URL.Path + " is not here",
	})
}

func answer(w http.ResponseWriter, code int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	// The client may be gone.
	_ = json.NewEncoder(w).Encode(body)
}
