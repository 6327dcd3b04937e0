//! A Kubernetes node's faces: the way to the API server, the bridge to the kubelet, and what is written to the cluster.
//!
//! Put together in two steps, because the claim manager stands between them: it reads claims from the API server, and what a kubelet
//! asks for is asked of it.

mod gate;
mod held;
mod kubelet;
mod pools;
mod statuses;

use std::sync::{Arc, OnceLock};

use anyhow::{Context, Result};
use tokio::sync::watch;

use self::gate::Gate;
use self::held::HeldFeed;
use self::kubelet::KubeletClaims;
use self::pools::{LocalClaims, Pools};
use self::statuses::StatusFeed;
use crate::admin::{AtStart, Cluster};
use crate::config::{Config, KubernetesConfig};
use nodedock_base::changes::Changes;
use nodedock_base::conditions::Conditions;
use nodedock_base::tasks::Tasks;
use nodedock_core::manager::Manager;
use nodedock_core::manager::claims::source::ClaimSource;
use nodedock_core::registry::Registry;
use nodedock_kube::api::{Api, ApiConfig, ApiExchange, Pace};
use nodedock_kube::bridge::plugins::{OwnPod, Plugins, PluginsParts, PoolsOfDrivers};
use nodedock_kube::bridge::{Bridge, BridgeParts, BridgeTimes};
use nodedock_kube::claims::ApiClaims;
use nodedock_kube::events::{self, Events};
use nodedock_kube::facts::Facts;
use nodedock_kube::reconcile::Reconcile;
use nodedock_kube::slices::{
    self, PoolNames, RegistryDrivers, RemoteSlices, Report, SliceParts, SliceSettings,
};
use nodedock_kube::status::Statuses;
use nodedock_model::{TaintEffect, limit};

/// The way to the API server, before there is anybody to use it.
pub(super) struct Connected {
    config: KubernetesConfig,
    api: Api,
    claims: ApiClaims,
    source: Arc<LocalClaims>,
    pools: Pools,
}

/// What the faces stand on.
pub(super) struct Parts<'a> {
    pub(super) config: &'a Config,
    pub(super) manager: Arc<Manager>,
    pub(super) registry: Registry,
    pub(super) changes: Changes,
    pub(super) conditions: Conditions,
    pub(super) at_start: Arc<AtStart>,
    /// Of what is written to the cluster.
    pub(super) tasks: Tasks,
}

/// The sockets by which a kubelet knows the drivers: those of an instance that hands over stay until the next one has its own.
#[derive(Default)]
pub(super) struct Faces {
    tasks: Tasks,
    gate: Gate,
    cluster: Option<Cluster>,
}

impl Faces {
    /// Returns when the kubelet knows every driver.
    pub(super) async fn known_to_kubelet(&self) {
        if let Some(cluster) = &self.cluster {
            cluster.known_to_kubelet().await;
        }
    }

    /// Lets no call through any more, and leaves the sockets as they are.
    pub(super) fn hold(&self) {
        self.gate.close();
        if let Some(cluster) = &self.cluster {
            cluster.bridge.hold();
            cluster.plugins.hold();
        }
    }

    /// Begins to close the sockets: registrations first, so that a kubelet asks no more.
    pub(super) fn close(&self) {
        self.tasks.stop();
    }

    pub(super) async fn drain(self) {
        if !self.tasks.drain(limit::DRAIN).await {
            tracing::warn!("some of the kubelet's connections did not end in time");
        }
    }
}

/// Finds the way to the API server; it need not be there yet.
pub(super) async fn connect(
    config: &KubernetesConfig,
    registry: &Registry,
    conditions: &Conditions,
    tasks: &Tasks,
) -> Result<Connected> {
    let pace = Pace { per_second: config.requests_per_second, burst: config.request_burst };
    let way = ApiConfig { pace, ..ApiConfig::new(config.kubeconfig.clone()) };
    let api = Api::connect(way).await.context("find the way to the API server")?;
    let node = config.node_name.to_string();
    let claims = ApiClaims::new(api.clone(), node.clone(), conditions.clone(), tasks.clone());
    let pools = Pools { names: PoolNames::OfNode(node), registry: registry.clone() };
    let source = Arc::new(LocalClaims { source: Arc::new(claims.clone()), pools: pools.clone() });
    Ok(Connected { config: config.clone(), api, claims, source, pools })
}

impl Connected {
    /// Where the claim manager reads claims.
    pub(super) fn source(&self) -> Arc<dyn ClaimSource> {
        self.source.clone()
    }

    /// Starts the faces. What can never work is refused.
    pub(super) fn start(self, parts: &Parts<'_>) -> Result<Faces> {
        let (tasks, gate) = (Tasks::new(), Gate::default());
        let exchange = Arc::new(ApiExchange::new(self.api.clone()));
        let (node, conditions) = (self.config.node_name.clone(), parts.conditions.clone());
        let facts = Facts::start(&parts.tasks, exchange.clone(), node.clone(), conditions.clone());
        let events =
            Events::start(&parts.tasks, exchange.clone(), node.clone(), facts.watch(), conditions.clone());
        events::follow(&parts.tasks, events.clone(), conditions.clone(), &parts.changes);
        let statuses = Statuses::start(&parts.tasks, exchange.clone(), conditions.clone());
        let feed = StatusFeed {
            claims: parts.manager.clone(),
            pools: self.pools.clone(),
            statuses: statuses.clone(),
        };
        parts.tasks.spawn("status-feed", feed.run(parts.tasks.clone()));
        let kubelet = Arc::new(KubeletClaims {
            claims: parts.manager.clone(),
            pools: self.pools.clone(),
            gate: gate.clone(),
            events: events.clone(),
            source: self.source.clone(),
            bridge: OnceLock::new(),
        });
        let bridge = self.bridge(parts, kubelet.clone(), &tasks)?;
        // It was not set before: this is its only place.
        let _ = kubelet.bridge.set(bridge.clone());
        let plugins = self.plugins(parts, kubelet.clone(), &tasks)?;
        let reconcile = Reconcile::start(&parts.tasks, exchange, node, kubelet);
        let held = HeldFeed {
            claims: parts.manager.clone(),
            api_claims: self.claims.clone(),
            reconcile: reconcile.clone(),
            changes: parts.changes.clone(),
        };
        parts.tasks.spawn("held-claims", held.run(parts.tasks.clone()));
        let settled = parts.at_start.settled(parts.registry.clone(), &parts.changes, &parts.tasks);
        let slices = self.slices(parts, facts, settled.clone());
        bridge.start();
        plugins.start();
        let cluster = Cluster {
            bridge,
            plugins,
            api: self.api,
            claims: self.claims,
            slices,
            statuses,
            events,
            reconcile,
            settled,
        };
        Ok(Faces { tasks, gate, cluster: Some(cluster) })
    }

    /// Until the tasks stop; what is written stays.
    fn slices(&self, parts: &Parts<'_>, facts: Facts, settled: watch::Receiver<bool>) -> Report {
        let (api, events) = RemoteSlices::follow(self.api.clone(), &parts.tasks, &self.config.node_name);
        let report = Report::default();
        slices::start(SliceParts {
            api,
            events,
            drivers: Box::new(RegistryDrivers::new(parts.registry.clone(), &parts.changes, settled)),
            node: facts.watch(),
            doubt_node: Box::new(move || facts.read_again()),
            settings: SliceSettings {
                names: self.pools.names.clone(),
                unhealthy: TaintEffect::NoSchedule,
                with_resource_pools: false,
            },
            conditions: parts.conditions.clone(),
            report: report.clone(),
            tasks: parts.tasks.clone(),
        });
        report
    }

    fn bridge(&self, parts: &Parts<'_>, claims: Arc<KubeletClaims>, tasks: &Tasks) -> Result<Bridge> {
        let held = parts.manager.held_for_kubelet().into_iter().flat_map(|held| held.drivers);
        let bridge = Bridge::new(BridgeParts {
            root: self.config.kubelet_root.clone(),
            instance: parts.config.instance.clone(),
            own_registry: parts.config.paths.plugins_registry.clone(),
            memory: parts.config.paths.offered_drivers.clone(),
            remembered: held.collect(),
            registry: parts.registry.clone(),
            pool_names: self.pools.names.clone(),
            claims,
            conditions: parts.conditions.clone(),
            times: BridgeTimes::default(),
            tasks: tasks.clone(),
        });
        bridge.context("offer drivers to the kubelet")
    }

    fn plugins(&self, parts: &Parts<'_>, claims: Arc<KubeletClaims>, tasks: &Tasks) -> Result<Plugins> {
        let own_pod = self.config.own_pod.clone();
        let plugins = Plugins::new(PluginsParts {
            kubelet_root: self.config.kubelet_root.clone(),
            instance: parts.config.instance.clone(),
            own_pod: own_pod.map(|pod| OwnPod { namespace: pod.namespace, name: pod.name }),
            pools: Arc::new(PoolsOfDrivers {
                devices: parts.manager.clone(),
                registry: parts.registry.clone(),
            }),
            claims,
            holders: parts.manager.clone(),
            changes: parts.changes.clone(),
            conditions: parts.conditions.clone(),
            tasks: tasks.clone(),
            memory: parts.config.paths.offered_devices.clone(),
        });
        plugins.context("offer extended resources to the kubelet")
    }
}

impl Faces {
    /// What metrics and probes read.
    pub(super) fn cluster(&self) -> Option<Cluster> {
        self.cluster.clone()
    }
}
