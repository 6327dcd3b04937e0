// Command typed-client creates, reads, updates and deletes an object of every kind of the local API with the typed clients of the official
// library, which send protobuf, and fails at the first answer that is not what was sent. It writes the kinds to standard output.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"os"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/util/retry"
	"k8s.io/utils/ptr"
)

// object is a pointer to an object of one kind.
type object interface{ metav1.Object }

// client is what every typed client can do.
type client[T object] interface {
	Create(context.Context, T, metav1.CreateOptions) (T, error)
	Get(context.Context, string, metav1.GetOptions) (T, error)
	Update(context.Context, T, metav1.UpdateOptions) (T, error)
	Delete(context.Context, string, metav1.DeleteOptions) error
	Watch(context.Context, metav1.ListOptions) (watch.Interface, error)
}

// statusClient is what the typed client of a kind with a status can do too.
type statusClient[T object] interface {
	UpdateStatus(context.Context, T, metav1.UpdateOptions) (T, error)
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "typed-client:", err)
		os.Exit(1)
	}
}

func run() error {
	kubeconfig := flag.String("kubeconfig", "", "file that describes the API server")
	flag.Parse()
	ctx, stop := context.WithTimeout(context.Background(), time.Minute)
	defer stop()
	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err != nil {
		return err
	}
	config.Wrap(onlyProtobuf)
	// The requests are few, and none waits for its turn.
	config.QPS = -1
	clients, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	return exerciseAll(ctx, clients)
}

type roundTripper func(*http.Request) (*http.Response, error)

func (r roundTripper) RoundTrip(request *http.Request) (*http.Response, error) { return r(request) }

// onlyProtobuf fails requests with a body in another encoding, of which nothing would be learned.
func onlyProtobuf(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(request *http.Request) (*http.Response, error) {
		content := request.Header.Get("Content-Type")
		if request.Body != nil && request.Method != http.MethodGet && content != "application/vnd.kubernetes.protobuf" {
			return nil, fmt.Errorf("%s %s is %q", request.Method, request.URL.Path, content)
		}
		return next.RoundTrip(request)
	})
}

// exercise takes an object through its life. update changes it, and status its status, if it has one.
func exercise[T object](ctx context.Context, kind string, with client[T], sent T, update, status func(T)) error {
	name := sent.GetName()
	made, err := with.Create(ctx, sent, metav1.CreateOptions{})
	if err := answered(kind, "create", sent, made, err); err != nil {
		return err
	}
	changed := func(what string, change func(T), send func(context.Context, T, metav1.UpdateOptions) (T, error)) error {
		return retry.RetryOnConflict(retry.DefaultRetry, func() error {
			next, err := with.Get(ctx, name, metav1.GetOptions{})
			if err != nil {
				return fmt.Errorf("%s: get: %w", kind, err)
			}
			change(next)
			answer, err := send(ctx, next, metav1.UpdateOptions{})
			if apierrors.IsConflict(err) {
				return err
			}
			if err := answered(kind, what, next, answer, err); err != nil {
				return err
			}
			kept, err := with.Get(ctx, name, metav1.GetOptions{})
			return answered(kind, "get after "+what, next, kept, err)
		})
	}
	if err := changed("update", update, with.Update); err != nil {
		return err
	}
	if status != nil {
		statuses, ok := with.(statusClient[T])
		if !ok {
			return fmt.Errorf("%s has no status", kind)
		}
		if err := changed("update of the status", status, statuses.UpdateStatus); err != nil {
			return err
		}
	}
	if err := deletion(ctx, with, name); err != nil {
		return fmt.Errorf("%s: %w", kind, err)
	}
	fmt.Println(kind)
	return nil
}

// deletion deletes an object: on trial, with a UID that is not its own, and in earnest.
func deletion[T object](ctx context.Context, with client[T], name string) error {
	if err := with.Delete(ctx, name, metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}}); err != nil {
		return fmt.Errorf("dry run of the deletion: %w", err)
	}
	other := metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: ptr.To(types.UID("other"))}}
	if err := with.Delete(ctx, name, other); !apierrors.IsConflict(err) {
		return fmt.Errorf("deletion of another object: %v", err)
	}
	kept, err := with.Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("get after the dry run: %w", err)
	}
	if kept.GetDeletionTimestamp() != nil {
		return errors.New("the dry run has begun the deletion")
	}
	options := metav1.ListOptions{FieldSelector: "metadata.name=" + name, ResourceVersion: kept.GetResourceVersion()}
	events, err := with.Watch(ctx, options)
	if err != nil {
		return fmt.Errorf("watch: %w", err)
	}
	defer events.Stop()
	if err := with.Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
		return fmt.Errorf("deletion: %w", err)
	}
	for event := range events.ResultChan() {
		if event.Type == watch.Deleted {
			break
		}
	}
	if _, err := with.Get(ctx, name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		return fmt.Errorf("get after the deletion: %v", err)
	}
	return nil
}
