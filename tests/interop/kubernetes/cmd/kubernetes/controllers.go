package main

import (
	"context"
	"errors"
	"flag"
	"os"

	"k8s.io/client-go/informers"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/cmd/kube-scheduler/app"
	"k8s.io/kubernetes/pkg/controller/resourceclaim"

	"nodedock/interop/kubernetes/internal/node"
)

const claimWorkers = 4

// controllers are the program kube-scheduler, which serves nothing here, and of the controllers the one that frees claims when their pods
// are gone. --kubeconfig says where the API server is.
func controllers(args []string) error {
	go func() {
		node.UntilInputEnds()
		os.Exit(0)
	}()
	flags := flag.NewFlagSet("controllers", flag.ContinueOnError)
	kubeconfig := flags.String("kubeconfig", "", "file that says where the API server is")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if err := startClaimController(context.Background(), *kubeconfig); err != nil {
		return err
	}
	command := app.NewSchedulerCommand()
	command.SetArgs([]string{"--secure-port=0", "--leader-elect=false", "--kubeconfig=" + *kubeconfig})
	if err := command.Execute(); err != nil {
		return err
	}
	return errors.New("the scheduler ended")
}

func startClaimController(ctx context.Context, kubeconfig string) error {
	// A claim of each pod takes several requests, and the tests wait for them.
	client, err := node.ClientOf(kubeconfig, 200, 400)
	if err != nil {
		return err
	}
	factory := informers.NewSharedInformerFactory(client, 0)
	controller, err := resourceclaim.NewController(
		klog.FromContext(ctx),
		resourceclaim.Features{AdminAccess: true, PrioritizedList: true},
		client,
		factory.Core().V1().Pods(),
		factory.Scheduling().V1alpha2().PodGroups(),
		factory.Resource().V1().ResourceClaims(),
		factory.Resource().V1().ResourceClaimTemplates(),
	)
	if err != nil {
		return err
	}
	factory.Start(ctx.Done())
	go controller.Run(ctx, claimWorkers)
	return nil
}
