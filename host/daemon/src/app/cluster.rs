//! A Kubernetes node: the client of the API server, the kubelet bridge, and the objects that are written to the cluster.
//!
//! Built in two steps, because the claim manager depends on the first and is a dependency of the second: it reads claims from the API
//! server, and the bridge calls it.

mod reports;

use std::sync::Arc;

use anyhow::{Context, Result};
use async_trait::async_trait;
use tokio::sync::{Semaphore, watch};

use self::reports::report_prepared;
pub(super) use self::reports::report_statuses;
use crate::admin::{AtStart, Cluster};
use crate::config::KubernetesConfig;
use nodedock_base::changes::Changes;
use nodedock_base::conditions::Conditions;
use nodedock_base::listeners::Listeners;
use nodedock_base::paths::Paths;
use nodedock_base::request;
use nodedock_base::tasks::Tasks;
use nodedock_core::checkpoint::{Checkpoint, Dump};
use nodedock_core::manager::Manager;
use nodedock_core::manager::claims::source::ClaimSource;
use nodedock_core::registry::Registry;
use nodedock_kube::binding::{Binding, BindingParts, EarlyClaims};
use nodedock_kube::bridge::{Bridge, BridgeParts, BridgeTimes, OfferedBefore};
use nodedock_kube::claims::ApiClaims;
use nodedock_kube::client::{ClientConfig, KubeClient, RequestRate};
use nodedock_kube::events::{self, Events, OnRefused};
use nodedock_kube::extended_resources::{ExtendedResources, LoadedSwitch, SwitchParts};
use nodedock_kube::facts::Facts;
use nodedock_kube::pools::NodePools;
use nodedock_kube::reconcile::{HeldClaims, Reconcile};
use nodedock_kube::slices::former::{self, FormerNames};
use nodedock_kube::slices::{
    self, DriverSnapshot, FailedDevices, SliceParts, SliceReport, SliceSettings,
};
use nodedock_kube::status::Statuses;
use nodedock_kube::taints::DeviceTaints;
use nodedock_model::{
    Claim, ClaimRecord, DriverName, KubeletClaim, NodeRecord, ObjectName, ObjectRef, Problem, Uid,
    limit,
};

/// Inputs of the slices.
struct SliceInputs {
    drivers: watch::Receiver<DriverSnapshot>,
    failed: watch::Receiver<FailedDevices>,
    extended_resources: ExtendedResources,
}

/// The client of the API server, before the claim manager is there to use it.
pub(super) struct Connected {
    config: KubernetesConfig,
    client: KubeClient,
    slices: watch::Receiver<SliceSettings>,
    claims: ApiClaims,
    pools: NodePools,
}

/// Parts of which the node's services are built.
pub(super) struct Parts<'a> {
    pub(super) paths: &'a Paths,
    pub(super) listeners: Listeners,
    pub(super) is_alone: bool,
    pub(super) checkpoint: Checkpoint,
    pub(super) manager: Arc<Manager>,
    pub(super) registry: Registry,
    pub(super) changes: Changes,
    pub(super) conditions: Conditions,
    pub(super) at_start: Arc<AtStart>,
    /// Tasks that write to the cluster.
    pub(super) tasks: Tasks,
}

/// What a cluster has from before the start, by the checkpoint.
pub(super) struct StoredOffers {
    /// Names that the node had before.
    node: Option<NodeRecord>,
    before: OfferedBefore,
    switch: LoadedSwitch,
}

impl StoredOffers {
    /// Takes the records from the dump.
    pub(super) fn take(dump: &mut Dump) -> Self {
        let mechanisms = dump.mechanisms.take();
        Self {
            node: dump.node.take(),
            before: OfferedBefore {
                drivers: std::mem::take(&mut dump.driver_offers),
                resources: std::mem::take(&mut dump.resource_offers),
            },
            switch: LoadedSwitch::new(mechanisms),
        }
    }
}

/// The sockets by which a kubelet knows the drivers: those of an instance that hands over become the next one's.
#[derive(Default)]
pub(super) struct KubeletSockets {
    tasks: Tasks,
    /// State that metrics and probes read.
    pub(super) cluster: Option<Cluster>,
}

impl KubeletSockets {
    /// The instance before has ended its connections.
    pub(super) fn set_alone(&self) {
        if let Some(cluster) = &self.cluster {
            cluster.bridge.set_alone();
        }
    }

    /// Forwards calls to the next instance from now on, and leaves the sockets as they are.
    pub(super) fn hold(&self) {
        if let Some(cluster) = &self.cluster {
            cluster.bridge.hold();
        }
    }

    /// Begins to close the sockets: registrations first, so that a kubelet calls no more.
    pub(super) fn close(&self) {
        self.tasks.stop();
    }

    /// Closes the sockets, and waits for the calls that are under way.
    pub(super) async fn drain(&self) {
        if !self.tasks.drain(limit::DRAIN).await {
            tracing::warn!("some of the kubelet's connections did not end in time");
        }
    }
}

/// Reads how to reach the API server, which need not be reachable yet.
pub async fn client(config: &KubernetesConfig) -> Result<KubeClient> {
    let rate = RequestRate {
        per_second: config.requests_per_second,
        burst: config.request_burst,
    };
    let client = KubeClient::connect(ClientConfig {
        rate,
        kubeconfig: config.kubeconfig.clone(),
    });
    client.await.context("connect to the API server")
}

impl Connected {
    /// `slices`: what operators add to devices, as the config has it now.
    pub(super) fn new(
        config: KubernetesConfig,
        client: KubeClient,
        slices: watch::Receiver<SliceSettings>,
        pools: NodePools,
        conditions: Conditions,
        tasks: Tasks,
    ) -> Self {
        let claims = ApiClaims::new(client.clone(), pools.clone(), conditions, tasks);
        Self {
            config,
            client,
            slices,
            claims,
            pools,
        }
    }

    /// Returns the source from which the claim manager reads claims.
    pub(super) fn source(&self) -> Arc<dyn ClaimSource> {
        Arc::new(self.claims.clone())
    }

    /// Starts the node's services. What can never work is refused.
    pub(super) fn start(self, parts: &Parts<'_>, offers: StoredOffers) -> Result<KubeletSockets> {
        let tasks = Tasks::new();
        let (node, conditions) = (self.config.node_name.clone(), parts.conditions.clone());
        let facts = Facts::start(&parts.tasks, &self.client, node.clone(), conditions.clone());
        let events = Events::start(
            &parts.tasks,
            self.client.clone(),
            node.clone(),
            facts.watch(),
            conditions.clone(),
        );
        events::publish_conditions(
            &parts.tasks,
            events.clone(),
            conditions.clone(),
            &parts.changes,
        );
        let statuses = Statuses::start(
            &parts.tasks,
            &self.client,
            conditions.clone(),
            on_refused(events.clone()),
            limit::STATUSES_MAX,
        );
        let StoredOffers {
            node: named,
            before,
            switch,
        } = offers;
        if let Some(record) = named {
            former::start(
                &parts.tasks,
                FormerNames {
                    client: self.client.clone(),
                    record,
                    checkpoint: parts.checkpoint.clone(),
                    conditions: conditions.clone(),
                },
            );
        }
        let bridge = self.bridge(parts, before, events.clone(), switch.handle(), &tasks)?;
        let prepared = Arc::new(PreparedClaims {
            manager: parts.manager.clone(),
            bridge: bridge.clone(),
        });
        let reconcile = Reconcile::start(
            &parts.tasks,
            &self.client,
            node,
            &self.config.kubelet_root,
            prepared,
        );
        let report = report_prepared(
            parts.manager.records.clone(),
            self.claims.clone(),
            reconcile.clone(),
            parts.changes.clone(),
            parts.tasks.clone(),
        );
        parts.tasks.spawn("held-claims", report);
        let settled = parts
            .at_start
            .settled(parts.registry.clone(), &parts.changes, &parts.tasks);
        let drivers = slices::watch_drivers(
            parts.registry.clone(),
            &parts.changes,
            settled,
            &parts.tasks,
        );
        let binding = self.binding(parts, &bridge, events.clone(), drivers.clone());
        let reports = report_statuses(
            parts.manager.records.clone(),
            self.pools.clone(),
            binding.statuses(),
            statuses.clone(),
            parts.tasks.clone(),
        );
        parts.tasks.spawn("status-feed", reports);
        let extended_resources = switch.handle();
        let inputs = SliceInputs {
            drivers: drivers.clone(),
            failed: binding.failed(),
            extended_resources: extended_resources.clone(),
        };
        let slices = self.slices(parts, facts, events.clone(), inputs);
        let taints = DeviceTaints::start(
            &parts.tasks,
            &self.client,
            parts.changes.clone(),
            parts.conditions.clone(),
            slices.clone(),
            self.pools.clone(),
        );
        bridge.start();
        switch.start(SwitchParts {
            client: self.client.clone(),
            names: self.pools.names.clone(),
            setting: self.config.extended_resources,
            checkpoint: parts.checkpoint.clone(),
            adapters: parts.manager.adapters.clone(),
            drivers,
            conditions,
            tasks: parts.tasks.clone(),
        });
        let (client, claims) = (self.client, self.claims);
        let cluster = Cluster {
            bridge,
            client,
            claims,
            slices,
            statuses,
            events,
            reconcile,
            taints,
            extended_resources,
        };
        Ok(KubeletSockets {
            tasks,
            cluster: Some(cluster),
        })
    }

    /// Writes slices until the tasks stop. They are not deleted then.
    fn slices(
        &self,
        parts: &Parts<'_>,
        node: Facts,
        events: Events,
        inputs: SliceInputs,
    ) -> SliceReport {
        let report = SliceReport::default();
        let watched = slices::watch_slices(&self.client, &self.config.node_name);
        let slice_parts = SliceParts {
            kube: self.client.clone(),
            turns: Arc::new(Semaphore::new(1)),
            drivers: inputs.drivers,
            node,
            names: self.pools.names.clone(),
            own_devices: parts.registry.own_devices.clone(),
            on_unhealthy: events::on_unhealthy(
                events,
                parts.manager.records.clone(),
                parts.manager.kubelet.clone(),
            ),
            settings: self.slices.clone(),
            failed: inputs.failed,
            extended_resources: inputs.extended_resources,
            conditions: parts.conditions.clone(),
            report: report.clone(),
            tasks: parts.tasks.clone(),
        };
        slices::start(slice_parts, watched);
        report
    }

    /// Prepares claims for schedulers that wait for devices, until the tasks stop.
    fn binding(
        &self,
        parts: &Parts<'_>,
        bridge: &Bridge,
        events: Events,
        drivers: watch::Receiver<DriverSnapshot>,
    ) -> Binding {
        let early = PreparedClaims {
            manager: parts.manager.clone(),
            bridge: bridge.clone(),
        };
        let binding = BindingParts {
            client: self.client.clone(),
            node: self.config.node_name.clone(),
            claims: self.claims.clone(),
            drivers,
            settings: self.slices.clone(),
            early: Arc::new(early),
            on_refused: on_refused(events),
            conditions: parts.conditions.clone(),
        };
        Binding::start(&parts.tasks, binding)
    }

    fn bridge(
        &self,
        parts: &Parts<'_>,
        offered_before: OfferedBefore,
        events: Events,
        extended_resources: ExtendedResources,
        tasks: &Tasks,
    ) -> Result<Bridge> {
        let paths = parts.paths;
        let bridge = Bridge::new(BridgeParts {
            root: self.config.kubelet_root.clone(),
            listeners: parts.listeners.clone(),
            is_alone: parts.is_alone,
            own_pod: self.config.own_pod.clone(),
            own_registry: paths.plugins_registry.clone(),
            checkpoint: parts.checkpoint.clone(),
            offered_before,
            manager: parts.manager.clone(),
            registry: parts.registry.clone(),
            pools: self.pools.clone(),
            extended_resources,
            source: self.source(),
            on_refused: on_refused(events),
            changes: parts.changes.clone(),
            conditions: parts.conditions.clone(),
            times: BridgeTimes::default(),
            tasks: tasks.clone(),
        });
        bridge.context("offer drivers to the kubelet")
    }
}

/// Publishes what is refused as Events.
fn on_refused(events: Events) -> OnRefused {
    Arc::new(move |refusal| events.refused(refusal))
}

/// The claims that are prepared for the kubelet, as the reconcile and the early preparation need them.
struct PreparedClaims {
    manager: Arc<Manager>,
    bridge: Bridge,
}

#[async_trait]
impl HeldClaims for PreparedClaims {
    fn held(&self) -> Vec<KubeletClaim> {
        self.manager.kubelet.held()
    }

    fn kubelet_is_connected(&self) -> bool {
        self.bridge.has_kubelet()
    }

    async fn unprepare_abandoned(&self, claim: &KubeletClaim, why: &str) -> Result<(), Problem> {
        self.bridge.claims()?.unprepare_all(claim, why).await
    }
}

#[async_trait]
impl EarlyClaims for PreparedClaims {
    fn early(&self) -> Vec<ObjectRef> {
        let held = self.manager.kubelet.held().into_iter();
        held.filter(|held| held.early)
            .map(|held| held.claim)
            .collect()
    }

    fn held(&self, namespace: &ObjectName, name: &ObjectName) -> Option<Arc<ClaimRecord>> {
        let records = self.manager.records.claims_in(namespace).into_iter();
        let mut named = records.filter(|record| record.id.name == *name);
        named.find(|record| record.is_held_by_kubelet())
    }

    async fn prepare(&self, driver: &DriverName, claim: Claim) -> Result<(), Problem> {
        self.bridge
            .claims()?
            .prepare_early(driver, claim, request::new_id())
            .await
    }

    async fn release(&self, claim: &Uid, why: &str) -> Result<(), Problem> {
        self.bridge.claims()?.unprepare_early(claim, why).await
    }
}
