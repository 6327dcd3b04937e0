//! A machine without a cluster: the local API on the checkpoint, its claims, and the slices of the drivers.
//!
//! The parts that speak to the API server of a cluster speak to this one: it is in the process, so they have no connection.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use async_trait::async_trait;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use nodedock_apiserver::{
    Cause, Change as ObjectChange, Check, Identity, InvalidParameters, Loaded, ObjectKey,
    OpaqueParameters, Options, ParametersCheck, Server, Storage, StorageError, serve_tls,
    serve_unix, serve_unix_by_user,
};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::net::UnixListener;
use tokio::sync::{Semaphore, watch};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::cluster::report_statuses;
use super::{device_class_files, users};
use crate::admin::AtStart;
use crate::config::LocalApiConfig;
use crate::user_connections::UserConnections;
use nodedock_base::changes::Changes;
use nodedock_base::clock::now_ms;
use nodedock_base::conditions::Conditions;
use nodedock_base::error::chain;
use nodedock_base::file;
use nodedock_base::paths::Paths;
use nodedock_base::request;
use nodedock_base::tasks::Tasks;
use nodedock_base::tcp::ListenAddress;
use nodedock_core::checkpoint::{Change, Checkpoint, CommitError};
use nodedock_core::driver::Call;
use nodedock_core::manager::Manager;
use nodedock_core::manager::claims::{HardwareHolds, PodSelector};
use nodedock_core::registry::Registry;
use nodedock_kube::client::KubeClient;
use nodedock_kube::extended_resources::{ExtendedResources, Mechanism};
use nodedock_kube::facts::Facts;
use nodedock_kube::local::{
    DeviceHolds, LocalClaims, LocalParts, NodeChanges, PreparedClaims, ensure_node,
};
use nodedock_kube::pools::{NodePools, PoolNames};
use nodedock_kube::slices::{self, SliceParts, SliceReport, SliceSettings};
use nodedock_kube::status::Statuses;
use nodedock_kube::taints::DeviceTaints;
use nodedock_model::{
    ApiObject, ClaimRecord, DELETED_REVISION_KEY, DriverName, Problem, ProblemCode, Uid, limit,
};

/// Maximum time of a driver for the check of parameters, for which a writer waits.
const PARAMETERS_DEADLINE: Duration = Duration::from_secs(10);

/// The local API, before the claim manager is there to use it.
pub(super) struct LocalApi {
    config: LocalApiConfig,
    server: Server,
    client: KubeClient,
    pools: NodePools,
    pub(super) claims: LocalClaims,
}

/// Parts of which the services of the local API are built.
pub(super) struct Parts<'a> {
    pub(super) paths: &'a Paths,
    pub(super) manager: Arc<Manager>,
    pub(super) registry: Registry,
    pub(super) changes: Changes,
    pub(super) conditions: Conditions,
    pub(super) at_start: Arc<AtStart>,
    pub(super) tasks: Tasks,
}

/// Sockets on which the API listens.
pub(super) struct Listeners {
    pub(super) socket: UnixListener,
    pub(super) address: Option<ListenAddress>,
}

impl Listeners {
    pub(super) async fn bind(socket: UnixListener, config: &LocalApiConfig) -> Self {
        let address = match config.listen {
            Some(address) => Some(ListenAddress::bind(address, "localApi.listen").await),
            None => None,
        };
        Self { socket, address }
    }
}

/// Identity of the API for clients on the address, as it is stored in a file that the daemon's user alone can read.
#[derive(Debug, Serialize, Deserialize)]
pub struct KeptIdentity {
    certificate: String,
    key: String,
    token: String,
    /// Last address on which the daemon listened. None: it never did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<SocketAddr>,
}

/// An identity that cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum IdentityFileError {
    #[error("read {}", path.display())]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("{} is no identity of the local API", path.display())]
    Damaged {
        path: PathBuf,
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// Renames a damaged file, and returns its new name.
fn set_aside(path: &Path) -> Result<PathBuf> {
    let aside = path.with_added_extension(format!("damaged-{}", now_ms()));
    std::fs::rename(path, &aside)
        .with_context(|| format!("rename {} to {}", path.display(), aside.display()))?;
    Ok(aside)
}

impl KeptIdentity {
    /// None: there is none yet.
    pub fn read(path: &Path) -> Result<Option<Self>, IdentityFileError> {
        let text = match std::fs::read(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(source) => {
                let path = path.to_owned();
                return Err(IdentityFileError::Read { path, source });
            }
        };
        let damaged = |source| IdentityFileError::Damaged {
            path: path.to_owned(),
            source,
        };
        let read: Self = serde_json::from_slice(&text).map_err(|error| damaged(error.into()))?;
        let usable = read.identity().check();
        usable.map_err(|error| damaged(error.into()))?;
        Ok(Some(read))
    }

    pub fn identity(&self) -> Identity {
        Identity {
            certificate_pem: self.certificate.clone(),
            key_pem: self.key.clone(),
            token: self.token.clone(),
        }
    }

    fn new() -> Result<Self> {
        let Identity {
            certificate_pem,
            key_pem,
            token,
        } = Identity::generate().context("make an identity of the local API")?;
        Ok(Self {
            certificate: certificate_pem,
            key: key_pem,
            token,
            address: None,
        })
    }

    /// The identity that is kept, or a new one, with the address of this start. A damaged file is set aside, with a condition until the next start:
    /// without its identity clients cannot reach the API, and without the daemon no claim can be prepared.
    fn open(path: &Path, address: SocketAddr, conditions: &Conditions) -> Result<Identity> {
        let kept = match Self::read(path) {
            Ok(Some(kept)) => kept,
            Ok(None) => Self::new()?,
            Err(IdentityFileError::Read { path, source }) => {
                return Err(source).with_context(|| format!("read {}", path.display()));
            }
            Err(damaged) => {
                let aside = set_aside(path)?;
                let message = format!(
                    "{}: it is set aside as {}, and the local API has a new certificate and token; give them to its clients with nodedock kubeconfig --output FILE",
                    chain(&damaged),
                    aside.display()
                );
                let problem = Problem::internal(ProblemCode::ApiIdentityReplaced, message);
                conditions.set(&path.display().to_string(), problem);
                Self::new()?
            }
        };
        let identity = kept.identity();
        let text = serde_json::to_vec_pretty(&Self {
            address: Some(address),
            ..kept
        });
        let written = text
            .map_err(std::io::Error::from)
            .and_then(|text| file::replace(path, &text));
        written.with_context(|| format!("write {}", path.display()))?;
        Ok(identity)
    }
}

/// The objects in the checkpoint.
struct ObjectStorage {
    checkpoint: Checkpoint,
    uids: Mutex<BTreeMap<ObjectKey, Uid>>,
}

impl ObjectStorage {
    /// `uids`: of the objects before this change, which may be another one of the same commit.
    fn stored(
        change: &ObjectChange,
        uids: &mut BTreeMap<ObjectKey, Option<Uid>>,
        before: Option<Uid>,
    ) -> Result<Vec<Change>, String> {
        let before = uids.get(&change.key).cloned().unwrap_or(before);
        let mut changes = Vec::new();
        let Some(object) = &change.object else {
            let revision = Arc::new(json!({ "resourceVersion": change.revision }));
            let key = Uid::new(DELETED_REVISION_KEY).map_err(|error| error.to_string())?;
            let deleted = ApiObject {
                uid: key,
                resource: String::new(),
                object: revision,
            };
            changes.push(Change::PutObject(Arc::new(deleted)));
            changes.extend(before.map(Change::DeleteObject));
            uids.insert(change.key.clone(), None);
            return Ok(changes);
        };
        let uid = uid_of(object)?;
        uids.insert(change.key.clone(), Some(uid.clone()));
        changes.extend(
            before
                .filter(|before| *before != uid)
                .map(Change::DeleteObject),
        );
        let resource = change.key.resource.to_owned();
        changes.push(Change::PutObject(Arc::new(ApiObject {
            uid,
            resource,
            object: object.clone(),
        })));
        Ok(changes)
    }

    fn note(&self, change: &ObjectChange) {
        let mut uids = self.uids.lock();
        match change
            .object
            .as_ref()
            .and_then(|object| uid_of(object).ok())
        {
            Some(uid) => drop(uids.insert(change.key.clone(), uid)),
            None => drop(uids.remove(&change.key)),
        }
    }
}

fn uid_of(object: &serde_json::Value) -> Result<Uid, String> {
    Uid::new(object["metadata"]["uid"].as_str().unwrap_or_default())
        .map_err(|error| error.to_string())
}

impl Storage for ObjectStorage {
    fn commit(&self, changes: Vec<ObjectChange>) -> BoxFuture<'_, Result<(), StorageError>> {
        Box::pin(async move {
            let failed =
                |is_reported, source: Box<dyn std::error::Error + Send + Sync>| StorageError {
                    changes: changes.len(),
                    is_reported,
                    source,
                };
            let mut records = Vec::with_capacity(changes.len());
            let mut uids = BTreeMap::new();
            for change in &changes {
                let before = self.uids.lock().get(&change.key).cloned();
                let stored = Self::stored(change, &mut uids, before);
                records.extend(stored.map_err(|why| failed(false, why.into()))?);
            }
            self.checkpoint.commit(records).await.map_err(|error| {
                let is_outage = matches!(error, CommitError::Store(_));
                failed(is_outage, error.into())
            })?;
            changes.iter().for_each(|change| self.note(change));
            Ok(())
        })
    }
}

impl LocalApi {
    /// Opens the API with the objects of the checkpoint, and makes the object of this node.
    pub(super) async fn open(
        config: LocalApiConfig,
        checkpoint: Checkpoint,
        objects: Vec<ApiObject>,
        registry: Registry,
    ) -> Result<Self> {
        let (mut loaded, mut uids) = (Loaded::default(), BTreeMap::new());
        for ApiObject {
            uid,
            resource,
            object,
        } in objects
        {
            if uid.as_str() == DELETED_REVISION_KEY {
                loaded.revision = object["resourceVersion"].as_u64().unwrap_or_default();
                continue;
            }
            let Some(served) = nodedock_apiserver::resource(&resource) else {
                tracing::warn!(resource, %uid, "an object of a kind that this release does not serve stays in the checkpoint");
                continue;
            };
            let key = ObjectKey {
                resource: served.plural,
                namespace: metadata(&object, "namespace"),
                name: metadata(&object, "name"),
            };
            uids.insert(key, uid);
            loaded.objects.push(Arc::unwrap_or_clone(object));
        }
        let storage = Arc::new(ObjectStorage {
            checkpoint,
            uids: Mutex::new(uids),
        });
        let options = Options {
            parameters: Some(by_drivers(registry.clone())),
            ..Options::default()
        };
        let server = Server::open(options, storage, loaded)
            .await
            .context("open the local API")?;
        let in_process = server.clone();
        let client = KubeClient::in_process(tower::service_fn(move |request| {
            let server = in_process.clone();
            async move { Ok::<_, tower::BoxError>(server.handle(request).await) }
        }));
        let made = ensure_node(&client, &config.node).await;
        made.with_context(|| format!("make the node {} of the local API", config.node))?;
        let pools = NodePools {
            names: PoolNames {
                node: config.node.clone(),
            },
            registry,
        };
        let claims = LocalClaims::new(client.clone(), pools.clone());
        Ok(Self {
            config,
            server,
            client,
            pools,
            claims,
        })
    }

    /// Serves the API and does for its claims what a cluster would, until the tasks stop.
    pub(super) fn start(
        self,
        parts: Parts<'_>,
        listeners: Listeners,
        users: Option<(UnixListener, UserConnections)>,
    ) -> Result<DeviceTaints> {
        let tasks = parts.tasks.clone();
        let stop = stop_of(&tasks);
        if let Some(((listener, connections), users)) = users.zip(self.config.users.clone()) {
            let (server, users) = (self.server.clone(), Arc::new(users));
            let server_of = move |uid| {
                users::server_of(server.clone(), users.clone(), connections.clone(), uid)
            };
            let serve = serve_unix_by_user(server_of, listener, stop.clone());
            tasks.spawn("local-api-users", serve);
        }
        self.serve(
            parts.paths,
            &tasks,
            parts.conditions.clone(),
            listeners,
            stop,
        )?;
        device_class_files::watch(
            parts.paths.device_classes.clone(),
            self.client.clone(),
            parts.conditions.clone(),
            &tasks,
        );
        let node = self.config.node.clone();
        let facts = Facts::start(&tasks, &self.client, node.clone(), parts.conditions.clone());
        let statuses = Statuses::start(
            &tasks,
            &self.client,
            parts.conditions.clone(),
            // Only an API server that stores protobuf refuses one.
            Arc::new(|_| {}),
            limit::STATUSES_MAX,
        );
        let reports = report_statuses(
            parts.manager.records.clone(),
            self.pools.clone(),
            watch::channel(BTreeMap::new()).1,
            statuses,
            tasks.clone(),
        );
        tasks.spawn("status-feed", reports);
        let settled = parts
            .at_start
            .settled(parts.registry.clone(), &parts.changes, &tasks);
        let report = SliceReport::default();
        let slice_parts = SliceParts {
            kube: self.client.clone(),
            turns: Arc::new(Semaphore::new(1)),
            drivers: slices::watch_drivers(parts.registry.clone(), &parts.changes, settled, &tasks),
            node: facts,
            names: self.pools.names.clone(),
            own_devices: parts.registry.own_devices.clone(),
            on_unhealthy: Arc::new(|_| {}),
            settings: watch::channel(SliceSettings::default()).1,
            failed: watch::channel(slices::FailedDevices::default()).1,
            // There is no kubelet whose device manager could have them.
            extended_resources: ExtendedResources::fixed(Mechanism::Dra),
            conditions: parts.conditions.clone(),
            report: report.clone(),
            tasks: tasks.clone(),
        };
        slices::start(
            slice_parts,
            slices::watch_slices(&self.client, &self.config.node),
        );
        let (changes, conditions) = (parts.changes.clone(), parts.conditions.clone());
        let taints = DeviceTaints::start(
            &tasks,
            &self.client,
            changes,
            conditions,
            report,
            self.pools.clone(),
        );
        let prepared = Arc::new(Prepared {
            manager: parts.manager,
            pools: self.pools.clone(),
            device_holds: Mutex::default(),
        });
        let local = LocalParts {
            client: self.client,
            node,
            changes: parts.changes,
            tasks,
        };
        self.claims.start(local, prepared);
        Ok(taints)
    }

    fn serve(
        &self,
        paths: &Paths,
        tasks: &Tasks,
        conditions: Conditions,
        listeners: Listeners,
        stop: CancellationToken,
    ) -> Result<()> {
        let server = self
            .server
            .with_check(of_others(self.pools.registry.clone()));
        if let Some(listener) = listeners.address {
            let address = listener.address();
            if !address.ip().is_loopback() {
                bail!("the local API listens on loopback addresses alone, and {address} is none");
            }
            let identity = KeptIdentity::open(&paths.api_identity, address, &conditions)?;
            let (server, stop) = (server.clone(), stop.clone());
            tasks.spawn("local-api-address", async move {
                let listener = tokio::select! {
                    () = stop.cancelled() => return,
                    listener = listener.listener(&conditions) => listener,
                };
                tracing::info!(%address, "the local API listens");
                if let Err(error) = serve_tls(server, listener, &identity, stop).await {
                    tracing::error!(error = chain(&error), %address, "the local API is not served on its address");
                }
            });
        }
        tasks.spawn("local-api", serve_unix(server, listeners.socket, stop));
        Ok(())
    }
}

/// Returns a token that is cancelled when the tasks stop.
fn stop_of(tasks: &Tasks) -> CancellationToken {
    let stop = CancellationToken::new();
    let (stopped, end) = (tasks.stopped(), stop.clone());
    tasks.spawn("local-api-end", async move {
        stopped.await;
        end.cancel();
    });
    stop
}

fn metadata(object: &Value, field: &str) -> String {
    object["metadata"][field]
        .as_str()
        .unwrap_or_default()
        .to_owned()
}

/// Refuses writes of slices of drivers whose slices the daemon publishes: another program that wrote them would give away devices that are
/// not there, and one that deleted them would hide devices.
fn of_others(registry: Registry) -> Check {
    Arc::new(move |route, write| {
        if route.resource.plural != "resourceslices" {
            return Vec::new();
        }
        let name = write.object()["spec"]["driver"]
            .as_str()
            .unwrap_or_default();
        let driver = DriverName::new(name)
            .ok()
            .filter(|driver| registry.kind(driver).is_some());
        let published = driver.filter(|driver| !registry.publishes_itself(driver));
        let why = "the slices of this driver are published by the daemon that runs it";
        published
            .map(|_| Cause::forbidden("spec.driver", why))
            .into_iter()
            .collect()
    })
}

/// Refuses opaque parameters that the driver refuses which serves under their name.
fn by_drivers(registry: Registry) -> ParametersCheck {
    Arc::new(move |parameters| {
        let registry = registry.clone();
        async move { invalid(&registry, &parameters).await }.boxed()
    })
}

/// Returns why a driver refuses parameters. `None`: it accepts them, or it does not serve here or fails, and the prepare of a claim checks them.
async fn invalid(registry: &Registry, of: &OpaqueParameters) -> Option<InvalidParameters> {
    // no error: the name was checked, and a driver that does not serve here checks nothing
    let name = DriverName::new(&of.driver).ok()?;
    // no error: as above
    let driver = registry.serving(&name).ok()?.claims?;
    let call = Call {
        request_id: request::new_id(),
        deadline: PARAMETERS_DEADLINE,
    };
    let texts = [of.parameters.as_str()];
    let verdicts = driver.validate_parameters(&call, &texts);
    let verdict = timeout(PARAMETERS_DEADLINE, verdicts).await;
    let why = match verdict.map(|verdicts| verdicts.into_iter().next()) {
        Ok(None | Some(Ok(()))) => return None,
        Ok(Some(Err(problem))) if problem.kind.is_permanent() => {
            let path = problem.details.iter().find(|(key, _)| key == "path");
            return Some(InvalidParameters {
                path: path.map(|(_, path)| path.clone()).unwrap_or_default(),
                why: problem.message,
            });
        }
        Ok(Some(Err(problem))) => problem.message,
        Err(_) => format!("it did not end within {PARAMETERS_DEADLINE:?}"),
    };
    let request = &call.request_id;
    tracing::warn!(driver = %name, %request, why, "parameters of an object of the local API are not checked before a prepare");
    None
}

/// The claims of the manager, as the local API's need them.
struct Prepared {
    manager: Arc<Manager>,
    pools: NodePools,
    /// The holds of devices as the manager had them last, and under the names that slices have.
    device_holds: Mutex<(Arc<Vec<HardwareHolds>>, Arc<DeviceHolds>)>,
}

#[async_trait]
impl PreparedClaims for Prepared {
    fn node_changes(&self, seen: Option<u64>) -> NodeChanges {
        NodeChanges::of(self.manager.records.changes_since(seen), &self.pools)
    }

    fn device_holds(&self) -> Arc<DeviceHolds> {
        let found = self.manager.holds.of_hardware();
        let mut known = self.device_holds.lock();
        if !Arc::ptr_eq(&known.0, &found) {
            let mut holds = DeviceHolds::default();
            for HardwareHolds {
                driver,
                pool,
                device,
                holds: of_device,
            } in &*found
            {
                let pool = self.pools.published(driver, pool);
                holds.set(
                    driver.as_str(),
                    pool.as_str(),
                    device.as_str(),
                    of_device.clone(),
                );
            }
            *known = (found, Arc::new(holds));
        }
        known.1.clone()
    }

    async fn unprepare_users(&self, claim: &str) -> Result<(), Problem> {
        let record = self.record(claim);
        for pod in record.iter().flat_map(|record| record.pods.keys()) {
            self.unprepare(pod.clone()).await?;
        }
        Ok(())
    }

    async fn unprepare_user(&self, claim: &str, pod: &str) -> Result<(), Problem> {
        let record = self.record(claim);
        let pods = record.iter().flat_map(|record| record.pods.keys());
        match pods.into_iter().find(|uid| uid.as_str() == pod) {
            Some(pod) => self.unprepare(pod.clone()).await,
            None => Ok(()),
        }
    }
}

impl Prepared {
    fn record(&self, claim: &str) -> Option<Arc<ClaimRecord>> {
        // no error: no claim has a UID that is none
        self.manager.records.claim(&Uid::new(claim).ok()?)
    }

    async fn unprepare(&self, pod: Uid) -> Result<(), Problem> {
        let outcomes = self
            .manager
            .pods
            .unprepare(PodSelector::Uid(pod), request::new_id())
            .await?;
        let failed = outcomes
            .into_iter()
            .flat_map(|outcome| outcome.claims)
            .find_map(|claim| claim.end.err());
        failed.map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use nodedock_apiserver::{DRA_GROUP, ObjectWrite, Route, resource};
    use serde_json::Value;

    use super::*;
    use nodedock_core::checkpoint;
    use nodedock_model::DriverKind;

    fn object(name: &str, uid: &str) -> Arc<Value> {
        Arc::new(
            json!({ "kind": "Pod", "apiVersion": "v1", "metadata": { "name": name, "uid": uid } }),
        )
    }

    fn change(name: &str, object: Option<Arc<Value>>, revision: u64) -> ObjectChange {
        let key = ObjectKey {
            resource: "pods",
            namespace: "default".to_owned(),
            name: name.to_owned(),
        };
        ObjectChange {
            key,
            object,
            revision,
        }
    }

    #[test]
    fn damaged_identity_is_set_aside() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("api-identity.json");
        let address = "127.0.0.1:7443".parse().unwrap();
        let conditions = Conditions::default();
        let first = KeptIdentity::open(&path, address, &conditions).unwrap();
        let again = KeptIdentity::open(&path, address, &conditions).unwrap();
        assert_eq!(first.token, again.token);
        assert!(conditions.list().is_empty());
        let whole = std::fs::read_to_string(&path).unwrap();
        let other_key = Identity::generate().unwrap().key_pem;
        let kept: Value = serde_json::from_str(&whole).unwrap();
        let mut of_other_key = kept.clone();
        of_other_key["key"] = other_key.into();
        let mut without_token = kept;
        without_token["token"] = "".into();
        let damaged = [
            Vec::new(),
            b"\xff\xfe".to_vec(),
            whole.as_bytes()[..whole.len() / 2].to_vec(),
            of_other_key.to_string().into_bytes(),
            without_token.to_string().into_bytes(),
        ];
        for text in damaged {
            std::fs::write(&path, &text).unwrap();
            let conditions = Conditions::default();
            let new = KeptIdentity::open(&path, address, &conditions).unwrap();
            assert_ne!(new.token, first.token);
            let [condition] = &conditions.list()[..] else {
                panic!("one condition");
            };
            assert_eq!(condition.problem.code, ProblemCode::ApiIdentityReplaced);
            let kept = std::fs::read_dir(directory.path()).unwrap().any(|entry| {
                let path = entry.unwrap().path();
                path.to_string_lossy().contains(".damaged-") && std::fs::read(path).unwrap() == text
            });
            assert!(kept, "{text:?}");
            assert_eq!(
                KeptIdentity::open(&path, address, &conditions)
                    .unwrap()
                    .token,
                new.token
            );
        }
    }

    #[test]
    fn published_slices_are_read_only() {
        let registry = Registry::new(Changes::default(), Conditions::default(), None);
        let name = |name: &str| DriverName::new(name).unwrap();
        for (kind, source, driver) in [
            (DriverKind::Wasm, "gpu.wasm", "gpu.example.com"),
            (DriverKind::Grpc, "nic.sock", "nic.example.com"),
        ] {
            registry
                .sources
                .update(kind, source, |view| view.name = Some(name(driver)));
        }
        let check = of_others(registry);
        let refused = |plural: &str, driver: &str| {
            let slice = json!({ "spec": { "driver": driver } });
            let route = Route {
                verb: "",
                group: DRA_GROUP.to_owned(),
                resource: resource(plural).unwrap(),
                namespace: String::new(),
                name: "s".to_owned(),
                subresource: String::new(),
                query: BTreeMap::new(),
            };
            let writes = [
                ObjectWrite::Created(&slice),
                ObjectWrite::Updated {
                    new: &slice,
                    old: &slice,
                },
                ObjectWrite::Deleted(&slice),
            ];
            writes.map(|write| !check(&route, write).is_empty())
        };
        assert_eq!(refused("resourceslices", "gpu.example.com"), [true; 3]);
        assert_eq!(refused("resourceslices", "nic.example.com"), [false; 3]);
        assert_eq!(
            refused("resourceslices", "elsewhere.example.com"),
            [false; 3]
        );
        assert_eq!(refused("resourceclaims", "gpu.example.com"), [false; 3]);
    }

    #[tokio::test]
    async fn objects_are_stored_by_uid() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("checkpoint.db");
        let opened = checkpoint::open(&path).unwrap();
        let storage = ObjectStorage {
            checkpoint: opened.checkpoint,
            uids: Mutex::default(),
        };
        let (one, other) = (object("a", "u1"), object("a", "u2"));
        storage
            .commit(vec![
                change("a", Some(one), 1),
                change("b", Some(object("b", "u3")), 2),
            ])
            .await
            .unwrap();
        // Deleted and made again, and made and deleted.
        storage
            .commit(vec![
                change("a", None, 3),
                change("a", Some(other.clone()), 4),
            ])
            .await
            .unwrap();
        storage
            .commit(vec![
                change("c", Some(object("c", "u4")), 5),
                change("c", None, 6),
            ])
            .await
            .unwrap();
        storage.commit(vec![change("b", None, 7)]).await.unwrap();
        storage.checkpoint.close().await;
        let objects = checkpoint::open(&path).unwrap().dump.objects;
        let found: Vec<_> = objects
            .iter()
            .map(|stored| (stored.uid.as_str(), &*stored.object))
            .collect();
        assert_eq!(
            found,
            [
                (DELETED_REVISION_KEY, &json!({ "resourceVersion": 7 })),
                ("u2", &*other)
            ]
        );
    }

    #[tokio::test]
    async fn batch_with_uidless_object_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("checkpoint.db");
        let opened = checkpoint::open(&path).unwrap();
        let storage = ObjectStorage {
            checkpoint: opened.checkpoint,
            uids: Mutex::default(),
        };
        let changes = vec![
            change("a", Some(object("a", "u1")), 1),
            change("b", Some(object("b", "")), 2),
        ];
        assert!(storage.commit(changes).await.is_err());
        storage.checkpoint.close().await;
        assert!(checkpoint::open(&path).unwrap().dump.objects.is_empty());
    }
}
