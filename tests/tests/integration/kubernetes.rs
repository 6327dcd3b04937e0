//! A daemon on a Kubernetes node.

mod adapters;
mod binding;
mod claims;
mod extended;
mod gone_devices;
mod kubelet;
mod old_plugins;
mod starts;
mod taints;
mod turns;

use std::sync::Arc;

use nodedock_proto::kubelet::dra::v1::Device;
use nodedock_stand_ins::kubelet::{ClaimRef, Kubelet, KubeletOptions, View};
use nodedock_tests::cluster::{Cluster, NAMESPACE, NODE};
use nodedock_tests::drivers::{MOCK_GPU_FILE, MOCK_GPU_NAME};
use nodedock_tests::{Daemon, Options};

/// Devices of a device plugin are in no slice: otherwise the device manager and the scheduler could allocate one device twice.
const GPUS: &str = "pools: [{name: gpus, count: 8}, {name: plugged, count: 8, firstIndex: 8, extendedResource: example.com/gpu}]\n";

/// A node whose kubelet runs; its slices are deleted where a kubelet deletes them.
struct Node {
    cluster: Arc<Cluster>,
    daemon: Daemon,
    kubelet: Kubelet,
}

impl Node {
    async fn start(config: &str) -> Self {
        Self::start_with(config, |options| options).await
    }

    async fn start_in(cluster: Cluster, config: &str) -> Self {
        Self::start_in_with(cluster, config, |options| options).await
    }

    async fn start_with(config: &str, options: impl FnOnce(Options) -> Options) -> Self {
        Self::start_in_with(Cluster::start().await, config, options).await
    }

    async fn start_in_with(
        cluster: Cluster,
        config: &str,
        options: impl FnOnce(Options) -> Options,
    ) -> Self {
        let cluster = Arc::new(cluster);
        let daemon = cluster.daemon_with(options(cluster.options())).await;
        let of = cluster.clone();
        let wipes = Arc::new(move |driver: Option<&str>| {
            of.api.wipe_slices(NODE, driver);
        });
        let options = KubeletOptions {
            wipes: Some(wipes),
            ..KubeletOptions::default()
        };
        let kubelet = Kubelet::start(&daemon.kubelet(), options).await;
        daemon.install_gpus(config);
        kubelet.registered(MOCK_GPU_NAME).await;
        daemon.until_serving(MOCK_GPU_FILE).await;
        Self {
            cluster,
            daemon,
            kubelet,
        }
    }

    /// Kills the daemon and starts it; returns when the kubelet has registered the driver of the new one.
    async fn crash(&mut self) {
        let registrations = |view: &View<'_>| view.count("NotifyRegistrationStatus", MOCK_GPU_NAME);
        let before = self
            .kubelet
            .wait_for("registrations", |view| Some(registrations(view)))
            .await;
        self.daemon.crash().await;
        let is_again =
            |view: &View<'_>| registrations(view) > before && view.connected(MOCK_GPU_NAME) > 0;
        self.kubelet
            .wait_until("the driver is registered again", is_again)
            .await;
    }

    /// A new claim for devices, as the kubelet names it.
    fn claim(&self, name: &str, devices: &[&str]) -> ClaimRef {
        ClaimRef::new(NAMESPACE, name, &self.cluster.gpu_claim(name, devices))
    }

    /// Prepares one claim; its devices, or the message of the refusal.
    async fn prepare(&self, claim: &ClaimRef) -> Result<Vec<Device>, String> {
        let mut answer = self
            .kubelet
            .driver(MOCK_GPU_NAME)
            .prepare(std::slice::from_ref(claim))
            .await?;
        Ok(answer.remove(&claim.uid).expect("every claim is answered"))
    }

    /// Prepares one claim; the CDI names of its first device.
    async fn prepared(&self, claim: &ClaimRef) -> Vec<String> {
        let devices = self.prepare(claim).await;
        devices
            .unwrap_or_else(|why| panic!("{why}\n{}", self.daemon.log()))
            .remove(0)
            .cdi_device_ids
    }

    async fn unprepared(&self, claim: &ClaimRef) {
        let end = self
            .kubelet
            .driver(MOCK_GPU_NAME)
            .unprepare(std::slice::from_ref(claim))
            .await;
        end.unwrap_or_else(|why| panic!("{why}\n{}", self.daemon.log()));
    }
}
