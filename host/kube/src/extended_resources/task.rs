//! The effects of the switch: a task reads the cluster, commits records, publishes mechanisms and sets conditions.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use kube::ResourceExt;
use kube::api::DynamicObject;
use kube::runtime::reflector::store::Writer;
use kube::runtime::watcher::Event;
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::classes::{self, Class};
use super::decide::{Cluster, Decision, MechanismSetting, Version, decide};
use super::switch::{ClaimsOfPools, Classes, LocalPool, Mechanisms, PoolStatus, Switch};
use super::{ExtendedResources, changed};
use crate::client::{ApiError, DraResource, DraVersion, ErrorKind, KubeClient};
use crate::drivers::DriverSnapshot;
use crate::pools::PoolNames;
use crate::preflight;
use nodedock_base::backoff::Backoff;
use nodedock_base::conditions::Conditions;
use nodedock_base::error::chain;
use nodedock_base::tasks::Tasks;
use nodedock_core::adapters::Adapters;
use nodedock_core::checkpoint::{Change, Checkpoint};
use nodedock_model::{
    DriverName, ExtendedResource, Mechanism, MechanismsRecord, ObjectName, ObjectRef, PoolName,
    Problem, ProblemCode,
};

/// Interval of reading the versions of the cluster: nothing reports that an API server is upgraded.
const CLUSTER_PERIOD: Duration = Duration::from_secs(600);

/// Delays after a read or a commit that failed.
const RETRY_MIN: Duration = Duration::from_secs(2);
const RETRY_MAX: Duration = Duration::from_secs(30);

/// Time after which a pool that is not offered as decided is reported.
const WAITING_LONG: Duration = Duration::from_secs(300);

/// Dependencies of the switch between mechanisms.
pub struct SwitchParts {
    pub client: KubeClient,
    pub names: PoolNames,
    pub setting: MechanismSetting,
    pub checkpoint: Checkpoint,
    pub drivers: watch::Receiver<DriverSnapshot>,
    /// Device plugins that are drivers, of which an operator may disable some.
    pub adapters: Option<Adapters>,
    pub conditions: Conditions,
    pub tasks: Tasks,
}

/// Decides as a daemon of this node would at its first start; `None`: the cluster cannot be read.
pub async fn decided(
    client: &KubeClient,
    node: &ObjectName,
    setting: MechanismSetting,
) -> Option<Decision> {
    let cluster = match setting {
        MechanismSetting::Auto => read_cluster(client, node).await,
        MechanismSetting::Dra | MechanismSetting::DevicePlugin => Cluster::default(),
    };
    decide(setting, &cluster)
}

/// Reads the versions of the cluster, each as far as it can be read.
async fn read_cluster(client: &KubeClient, node: &ObjectName) -> Cluster {
    let server = client.server_version().await;
    let serves_v1 = match client.dra_version().await {
        Ok(version) => Some(version == DraVersion::V1),
        Err(error) if error.kind == ErrorKind::NotServed => Some(false),
        Err(_) => None,
    };
    // no error: the version of the kubelet is unknown then, and read again
    let node = preflight::node(client, node).await.ok().flatten();
    Cluster {
        server: server.map(|(major, minor)| Version { major, minor }),
        serves_v1,
        kubelet: node.map(|info| info.kubelet_version),
    }
}

/// The mechanisms before their task runs.
pub struct LoadedSwitch {
    handle: ExtendedResources,
    switch: Switch,
    stored: MechanismsRecord,
}

impl LoadedSwitch {
    /// Takes what was decided before a restart. Without it nothing is known of any pool.
    pub fn new(stored: Option<MechanismsRecord>) -> Self {
        let stored = stored.unwrap_or_default();
        let switch = Switch::new(stored.clone());
        let handle = ExtendedResources::new(switch.mechanisms());
        Self {
            handle,
            switch,
            stored,
        }
    }

    pub fn handle(&self) -> ExtendedResources {
        self.handle.clone()
    }

    /// Starts the task that decides, and switches.
    pub fn start(self, parts: SwitchParts) {
        let tasks = parts.tasks.clone();
        let task = SwitchTask {
            loaded: self,
            parts,
            cluster_at: Instant::now(),
            retry_at: None,
            backoff: Backoff::new(RETRY_MIN, RETRY_MAX),
            classes: None,
            classes_read: None,
            released: None,
            waiting: BTreeMap::new(),
        };
        // What it was about to do is done again after the next start.
        tasks.spawn_until_stopped("extended-resources", task.run());
    }
}

/// All DeviceClasses, or the error of a list or a watch.
type ClassesRead = Result<Vec<Class>, ApiError>;

struct SwitchTask {
    loaded: LoadedSwitch,
    parts: SwitchParts,
    /// Time of the next read of the versions.
    cluster_at: Instant,
    /// Time at which failed work is repeated.
    retry_at: Option<Instant>,
    backoff: Backoff,
    /// The watch of the DeviceClasses, while a pool needs one, and its last item.
    classes: Option<BoxStream<'static, ClassesRead>>,
    classes_read: Option<ClassesRead>,
    /// A claim that keeps a pool; resolves when it is released.
    released: Option<(ObjectRef, BoxFuture<'static, ()>)>,
    /// Times since which pools are not offered as decided.
    waiting: BTreeMap<LocalPool, Instant>,
}

impl SwitchTask {
    async fn run(mut self) {
        let mut reported = self.loaded.handle.0.reported.subscribe();
        let mut adapters = self.parts.adapters.as_ref().map(Adapters::changes);
        loop {
            if let Some(adapters) = &mut adapters {
                adapters.mark_unchanged();
            }
            let inputs = &mut self.loaded.switch.inputs;
            inputs.pools = pools_of(&self.parts.drivers.borrow_and_update());
            inputs.reported = reported.borrow_and_update().clone();
            let disabled = self.parts.adapters.iter().flat_map(Adapters::disabled);
            let disabled = disabled.map(|(driver, pool)| LocalPool { driver, pool });
            inputs.disabled = disabled.collect();
            self.judge_classes();
            self.loaded.publish();
            self.work().await;
            self.follow_claim();
            let mechanisms = self.loaded.publish();
            self.report_waiting(&mechanisms);
            if let Some(adapters) = &self.parts.adapters {
                report_returned(adapters, &mechanisms).await;
            }
            let wake = self.next_wake();
            tokio::select! {
                // Whichever it was, the next round checks everything. What is dropped is in its channel, or is read again.
                Ok(()) = self.parts.drivers.changed() => {}
                Ok(()) = reported.changed() => {}
                () = changed(&mut adapters) => {}
                item = next_of(&mut self.classes) => self.take_classes(item),
                claim = released(&mut self.released) => self.loaded.switch.released(&claim),
                () = sleep_until(wake) => {}
            }
        }
    }

    /// Does what is due, and repeats it after a while if it fails.
    async fn work(&mut self) {
        if self.retry_at.is_some_and(|at| Instant::now() < at) {
            return;
        }
        let is_done = self.decide().await && self.advance().await;
        if is_done {
            self.backoff.reset();
        }
        self.retry_at = (!is_done).then(|| Instant::now() + self.backoff.delay());
    }

    /// Decides by what can be read now, if that is due. A failed read changes nothing.
    async fn decide(&mut self) -> bool {
        if Instant::now() < self.cluster_at {
            return true;
        }
        let parts = &self.parts;
        let decision = decided(&parts.client, &parts.names.node, parts.setting).await;
        let Some(decision) = decision else {
            return false;
        };
        self.cluster_at = Instant::now() + CLUSTER_PERIOD;
        let Decision { mechanism, reason } = &decision;
        if self.loaded.stored.decided != Some(*mechanism) {
            tracing::info!(%mechanism, reason, "extended resources are offered by this mechanism");
        }
        self.loaded.switch.inputs.decision = Some(decision);
        self.judge_classes();
        true
    }

    /// Reads the claims, if a pool waits for that, and commits what follows. False: a read or the commit failed.
    async fn advance(&mut self) -> bool {
        let (switch, parts) = (&mut self.loaded.switch, &self.parts);
        if switch.awaits_claims() {
            match read_claims(&parts.client, &parts.names).await {
                Ok(claims) => switch.claims_read(claims),
                Err(error) => {
                    tracing::debug!(%error, "the claims cannot be read for extended resources");
                    return false;
                }
            }
        }
        let record = switch.proposal();
        if record == self.loaded.stored {
            return true;
        }
        let change = Change::PutMechanisms(Arc::new(record.clone()));
        if let Err(error) = parts.checkpoint.commit(vec![change]).await {
            // The checkpoint reports that it takes no writes.
            let error = chain(&error);
            tracing::debug!(error, "the mechanisms of pools are not stored yet");
            return false;
        }
        self.loaded.stored = record.clone();
        switch.set_known(record);
        true
    }

    /// Follows a claim that keeps a pool in slices: no event of this node says that the API server has no such claim any more.
    fn follow_claim(&mut self) {
        let claim = self.loaded.switch.claim_in_the_way();
        if self.released.as_ref().map(|(followed, _)| followed) != claim {
            let (client, names) = (&self.parts.client, &self.parts.names);
            self.released = claim.map(|claim| {
                let released = until_released(client.clone(), names.clone(), claim.clone());
                (claim.clone(), Box::pin(released) as BoxFuture<'static, ()>)
            });
        }
    }

    /// Takes an item of the watch, which has logged an error. After another one than a refusal, what was read stays.
    fn take_classes(&mut self, item: ClassesRead) {
        let is_refused = |error: &ApiError| error.kind == ErrorKind::Forbidden;
        if item.as_ref().err().is_none_or(is_refused) {
            self.classes_read = Some(item);
        }
    }

    /// Sets the conditions about DeviceClasses, which are watched while a pool needs one.
    fn judge_classes(&mut self) {
        let (conditions, switch) = (&self.parts.conditions, &mut self.loaded.switch);
        let needed = switch.needs_classes();
        if needed.is_empty() {
            (self.classes, self.classes_read) = (None, Some(Ok(Vec::new())));
        } else if self.classes.is_none() {
            let classes = watch_classes(&self.parts.client);
            (self.classes, self.classes_read) = (Some(classes), None);
        }
        let mut problems = BTreeMap::new();
        let with_devices = resources_with_devices(&self.parts.drivers.borrow());
        for (resource, driver) in &needed {
            let problem = match &self.classes_read {
                Some(Ok(classes)) => classes::judge(resource, driver, classes),
                // Who may not list them knows of none.
                Some(Err(error)) => Some(classes::unreadable(error)),
                None => None,
            };
            problems.extend(problem.map(|problem| (resource.to_string(), problem)));
        }
        let is_ready = |resource: &ExtendedResource| !problems.contains_key(resource.as_str());
        // Without a device there is nothing that a pod could miss.
        let reported = problems
            .iter()
            .filter(|(resource, _)| with_devices.contains(resource.as_str()))
            .map(|(resource, problem)| (resource.clone(), problem.clone()));
        let reported = reported.collect();
        switch.inputs.classes = match self.parts.setting {
            MechanismSetting::Dra => Classes::NotNeeded,
            _ if self.classes_read.is_none() => Classes::Unread,
            _ => Classes::Ready(needed.into_keys().filter(is_ready).collect()),
        };
        switch.refresh();
        if self.classes_read.is_some() {
            for code in [
                ProblemCode::DeviceClassConflict,
                ProblemCode::DeviceClassMissing,
            ] {
                conditions.replace(code, &reported);
            }
        }
    }

    fn report_waiting(&mut self, mechanisms: &Mechanisms) {
        let (waiting, now) = (self.loaded.switch.waiting(), Instant::now());
        self.waiting.retain(|key, _| waiting.contains(key));
        for key in waiting {
            self.waiting.entry(key).or_insert(now);
        }
        let is_late = |key: &LocalPool| {
            let since = self.waiting.get(key);
            since.is_some_and(|since| now >= *since + WAITING_LONG)
        };
        let late = mechanisms.pools.iter().filter(|(key, _)| is_late(key));
        let late = late.map(|(key, status)| {
            let subject = format!("{}/{}", key.driver, self.parts.names.shown(&key.pool));
            let problem = waiting_long(&subject, status);
            (subject, problem)
        });
        let code = ProblemCode::ExtendedResourceWithheld;
        self.parts.conditions.replace(code, &late.collect());
    }

    fn next_wake(&self) -> Instant {
        let now = Instant::now();
        let late = self.waiting.values().map(|since| *since + WAITING_LONG);
        let late = late.filter(|at| *at > now);
        let work = self.retry_at.unwrap_or(self.cluster_at);
        late.fold(work, Instant::min)
    }
}

impl LoadedSwitch {
    fn publish(&self) -> Arc<Mechanisms> {
        let now = Arc::new(self.switch.mechanisms());
        self.handle.0.mechanisms.send_if_modified(|known| {
            let differs = *known != now;
            if differs {
                log_changes(known, &now);
                known.clone_from(&now);
            }
            differs
        });
        now
    }
}

fn waiting_long(subject: &str, status: &PoolStatus) -> Problem {
    let (resource, waits_for) = (&status.resource, &status.waits_for);
    let how = match status.offered {
        Some(offered) => format!("still offered by {offered}"),
        None => "offered neither in ResourceSlices nor to the kubelet".to_owned(),
    };
    let message =
        format!("the devices of pool {subject} ({resource}) are {how}: it waits for {waits_for}");
    Problem::unavailable(ProblemCode::ExtendedResourceWithheld, message)
}

/// Reports the drivers all of whose pools are offered by the kubelet's device manager.
async fn report_returned(adapters: &Adapters, mechanisms: &Mechanisms) {
    let drivers = mechanisms.pools.keys().map(|key| key.driver.clone());
    let mut returned: BTreeSet<_> = drivers.collect();
    for (key, status) in &mechanisms.pools {
        if status.offered != Some(Mechanism::DevicePlugin) {
            returned.remove(&key.driver);
        }
    }
    if let Err(problem) = adapters.set_returned(&returned).await {
        tracing::debug!(%problem, "what is returned to the device manager is not stored yet");
    }
}

/// The pools of the drivers that serve, with their resource.
fn pools_of(drivers: &DriverSnapshot) -> BTreeMap<LocalPool, Option<ExtendedResource>> {
    let mut pools = BTreeMap::new();
    for (driver, published) in &drivers.serving {
        for (name, pool) in &published.inventory.pools {
            pools.insert(LocalPool::new(driver, name), pool.extended_resource.clone());
        }
    }
    pools
}

/// Returns the extended resources of which a driver has a device.
fn resources_with_devices(drivers: &DriverSnapshot) -> BTreeSet<ExtendedResource> {
    let pools = drivers
        .serving
        .values()
        .flat_map(|published| published.inventory.pools.values());
    pools
        .filter(|pool| !pool.devices.is_empty())
        .filter_map(|pool| pool.extended_resource.clone())
        .collect()
}

fn log_changes(before: &Mechanisms, now: &Mechanisms) {
    for (LocalPool { driver, pool }, status) in &now.pools {
        let offered = |mechanisms: &Mechanisms| mechanisms.of(driver, pool, true);
        if offered(before) != offered(now) {
            let mechanism = status.offered.map_or("none", Mechanism::as_str);
            tracing::info!(%driver, %pool, resource = %status.resource, mechanism, "pool offered");
        }
    }
}

/// Watches DeviceClasses. Each item is all of them, or an error, after which they are listed again.
fn watch_classes(client: &KubeClient) -> BoxStream<'static, ClassesRead> {
    let (kind, what) = (DraResource::Classes, "device classes");
    let watch = client.watch(what, kind, None, String::new(), None);
    let mut writer = Writer::<DynamicObject>::new(DraVersion::V1.resource(kind));
    let known = writer.as_reader();
    let classes = watch.filter_map(move |event| {
        let classes = event.map(|event| {
            writer.apply_watcher_event(&event);
            let is_list = !matches!(event, Event::Init | Event::InitApply(_));
            is_list.then(|| known.state().iter().map(|class| Class::of(class)).collect())
        });
        std::future::ready(classes.transpose())
    });
    classes.boxed()
}

/// Reads all claims once, as they are now and not from a cache. No selector gives those of a node.
async fn read_claims(client: &KubeClient, names: &PoolNames) -> Result<ClaimsOfPools, ApiError> {
    let (kind, what) = (DraResource::Claims, "claims with devices of this node");
    let mut list = pin!(client.watch(what, kind, None, String::new(), None));
    let mut found = ClaimsOfPools::new();
    while let Some(event) = list.next().await {
        match event? {
            Event::InitApply(claim) => {
                for pool in pools_of_claim(names, &claim) {
                    found.entry(pool).or_default().insert(reference(&claim)?);
                }
            }
            // The watch, which would follow, does not begin.
            Event::InitDone => break,
            _ => {}
        }
    }
    Ok(found)
}

/// Resolves when a claim has no device of this node any more.
async fn until_released(client: KubeClient, names: PoolNames, claim: ObjectRef) {
    let (kind, what) = (DraResource::Claims, "a claim that keeps a pool in slices");
    let field = format!("metadata.name={}", claim.name);
    let watch = client.watch(what, kind, Some(claim.namespace), field, None);
    let (mut watch, mut is_there) = (pin!(watch), false);
    while let Some(event) = watch.next().await {
        let is_list = matches!(event, Ok(Event::Init | Event::InitApply(_)) | Err(_));
        match event {
            Ok(Event::InitApply(object) | Event::Apply(object)) => {
                let is_same = object.uid().as_deref() == Some(claim.uid.as_str());
                is_there = is_same && !pools_of_claim(&names, &object).is_empty();
            }
            Ok(Event::Init | Event::Delete(_)) => is_there = false,
            // The watch has logged an error, and lists again.
            Ok(Event::InitDone) | Err(_) => {}
        }
        if !is_there && !is_list {
            return;
        }
    }
}

/// Returns the pools of this node of which a claim has devices. Those with admin access do not count.
fn pools_of_claim(names: &PoolNames, claim: &DynamicObject) -> Vec<LocalPool> {
    let results = claim.data.pointer("/status/allocation/devices/results");
    let results = results.and_then(Value::as_array).into_iter().flatten();
    let pool = |result: &Value| {
        let driver = DriverName::new(result["driver"].as_str()?).ok()?;
        let pool = PoolName::new(result["pool"].as_str()?).ok()?;
        LocalPool::of_published(names, &driver, &pool)
    };
    let results = results.filter(|result| result["adminAccess"] != true);
    results.filter_map(pool).collect()
}

fn reference(claim: &DynamicObject) -> Result<ObjectRef, ApiError> {
    let (namespace, uid) = (claim.namespace(), claim.uid());
    let (namespace, uid) = (namespace.unwrap_or_default(), uid.unwrap_or_default());
    let invalid = |error| ApiError::new(ErrorKind::NotKubernetes, format!("a claim has {error}"));
    ObjectRef::new(&namespace, &claim.name_any(), &uid).map_err(invalid)
}

async fn next_of<T>(stream: &mut Option<BoxStream<'static, T>>) -> T {
    let item = match stream {
        Some(stream) => stream.next().await,
        None => None,
    };
    match item {
        Some(item) => item,
        // There is no watch; one does not end.
        None => std::future::pending().await,
    }
}

async fn released(followed: &mut Option<(ObjectRef, BoxFuture<'static, ()>)>) -> ObjectRef {
    if let Some((_, released)) = followed {
        released.await;
    }
    match followed.take() {
        Some((claim, _)) => claim,
        None => std::future::pending().await,
    }
}
