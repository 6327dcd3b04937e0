//! The composition root: builds bottom-up, binds every socket, and only then starts tasks; drains at the end.

mod adapters;
mod cdi_driver;
mod cluster;
mod device_class_files;
pub mod directories;
mod handover;
pub mod hardware;
mod local;
mod node_name;
mod reload;
mod state;
mod users;

pub use cluster::client as cluster_client;
pub use local::KeptIdentity;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use futures::FutureExt;
use tokio::net::UnixListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, watch};

use crate::admin::{self, Admin, AtStart};
use crate::config::{Config, FileConfig, RecordedName};
use crate::node_api::{self, NodeApi};
use crate::pod_resources::{self, PodResources};
use crate::recording::RecordedDrivers;
use nodedock_base::changes::Changes;
use nodedock_base::clock::now_ms;
use nodedock_base::conditions::Conditions;
use nodedock_base::failpoint::{self, Point};
use nodedock_base::listeners::{Listeners, Restarts};
use nodedock_base::paths::Paths;
use nodedock_base::socket;
use nodedock_base::tasks::Tasks;
use nodedock_base::tcp::ListenAddress;
use nodedock_base::watched;
use nodedock_core::adapters::Adapters;
use nodedock_core::cdi::CdiDir;
use nodedock_core::cdi_driver::CdiDriver;
use nodedock_core::cdi_watch;
use nodedock_core::checkpoint::{Checkpoint, StoredRecords};
use nodedock_core::device_metadata::{self, MetadataSettings};
use nodedock_core::driver::NodeFacts;
use nodedock_core::hardware::Hardware;
use nodedock_core::manager::claims::source::{ClaimDirectory, ClaimSource};
use nodedock_core::manager::devices;
use nodedock_core::manager::{Manager, ManagerParts, ManagerSettings};
use nodedock_core::pools::{LocalizedClaims, NodePools};
use nodedock_core::recording::Recordings;
use nodedock_core::records::RecordedValues;
use nodedock_core::records::SharedClaimTable;
use nodedock_core::records::table::ClaimTable;
use nodedock_core::registry::Registry;
use nodedock_core::registry::names::{self, NameStore};
use nodedock_core::sysfs::SysfsTree;
use nodedock_kube::client::KubeClient;
use nodedock_model::{NameRecord, PoolNames, Problem, ProblemCode, limit};
use nodedock_native::endpoints::Endpoints;
use nodedock_native::grpc::PluginTimes;
use nodedock_native::plugins::Plugins;
use nodedock_native::registration;
use nodedock_native::sockets;
use nodedock_wasm::driver_image::DriverImage;
use nodedock_wasm::file_watch;
use nodedock_wasm::kernel::{self, KernelEvents};
use nodedock_wasm::registry::previous_versions::PreviousVersions;
use nodedock_wasm::registry::wasm_files::{FileMemory, WasmFiles};
use nodedock_wasm::trust::Trust;
use nodedock_wasm::{CachePaths, Compiler, WasmHost, WasmSettings};

use self::adapters::{AdapterFiles, ApplyAdapters};
use self::cluster::{Connected, KubeletSockets, StoredOffers};
use self::local::LocalApi;
use self::reload::{LiveImages, LiveSettings, Reload};
use self::users::UserSockets;
use crate::device_names::{self, DeviceNames};
use crate::user_connections::UserConnections;

/// Time that a crash of the daemon stays a condition.
const CRASH_REPORTED: Duration = Duration::from_secs(600);

/// Queue of events of a watched directory.
const FILE_EVENTS_WAITING_MAX: usize = 64;

/// State of this process's start that depends on earlier starts.
pub struct Start {
    pub boot_id: String,
    /// Sockets that may outlive the process.
    pub listeners: Listeners,
    /// Present in a daemon with a parent process (`nodedockd run --supervise`).
    pub restarts: Option<Restarts>,
    /// The last crash was reported.
    pub is_reported: AtomicBool,
}

/// Runs the daemon until SIGTERM or SIGINT, then drains it.
pub async fn run(config: Config, start: Start) -> Result<()> {
    let mut signals = Signals::new()?;
    if let Some(instance) = config.instance.clone() {
        return Box::pin(handover::run(config, start, instance, signals)).await;
    }
    let daemon = Daemon::start(config, &start, true).await?;
    report_ready(&start);
    signals.received().await;
    stop(daemon, &mut signals).await;
    Ok(())
}

fn report_ready(start: &Start) {
    start.listeners.ready();
    // A machine without systemd has no receiver.
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    tracing::info!("ready");
}

/// Drains a daemon, unless a second signal says that it takes too long.
async fn stop(daemon: Daemon, signals: &mut Signals) {
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
    tracing::info!("stopping");
    tokio::select! {
        () = daemon.drain() => {}
        // What is durable stays durable; the rest is driven again at the next start.
        () = signals.received() => tracing::warn!("stopping at once"),
    }
    tracing::info!("stopped");
}

/// This boot's ID.
pub fn boot_id() -> Result<String> {
    let path = "/proc/sys/kernel/random/boot_id";
    let text = std::fs::read_to_string(path).with_context(|| format!("read {path}"))?;
    Ok(text.trim().to_owned())
}

/// Signals that stop a program.
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Listens for SIGTERM and SIGINT.
    pub fn new() -> Result<Self> {
        let terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
        let interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
        Ok(Self {
            terminate,
            interrupt,
        })
    }

    /// Waits for one of the signals.
    pub async fn received(&mut self) {
        tokio::select! {
            // Either will do, and a signal that is not received here stays pending.
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

struct Daemon {
    /// State that metrics and probes read.
    admin: Admin,
    /// The sockets by which a kubelet knows the drivers.
    kubelet_sockets: KubeletSockets,
    tasks: DaemonTasks,
}

#[derive(Default)]
struct DaemonTasks {
    /// Tasks that accept new work: the APIs.
    intake: Tasks,
    /// Requests under way.
    work: Tasks,
    /// Discovery, the workers of drivers, the connections to plugins: requests under way need them to the end.
    drivers: Tasks,
}

/// Parts that are opened before a socket is bound. No task runs yet.
struct Built {
    config: Config,
    node: NodeFacts,
    started_ms: u64,
    changes: Changes,
    cdi: CdiDir,
    checkpoint: Checkpoint,
    claims: Arc<SharedClaimTable>,
    /// Names of drivers and extended resources.
    names: Vec<NameRecord>,
    adapters: Adapters,
    adapter_files: AdapterFiles,
    cdi_driver: Option<CdiDriver>,
    values: Arc<RecordedValues>,
    wasm: WasmFiles,
    /// Present on a Kubernetes node.
    client: Option<KubeClient>,
    offers: Option<StoredOffers>,
    local: Option<LocalApi>,
    recordings: Recordings,
    tasks: DaemonTasks,
}

/// The sockets of this daemon's services.
struct Sockets {
    node_api: UnixListener,
    pod_resources: UnixListener,
    admin: UnixListener,
    admin_address: Option<ListenAddress>,
    device_plugins: UnixListener,
    local_api: Option<local::Listeners>,
    users: Option<UserSockets>,
}

impl Daemon {
    /// `is_alone`: no instance before this one is still there.
    async fn start(config: Config, start: &Start, is_alone: bool) -> Result<Self> {
        let built = Built::open(config, start.boot_id.clone()).await?;
        let sockets = Sockets::bind(&built.config, &start.listeners).await?;
        built.run(start, sockets, is_alone)
    }

    /// Ends everything. Calls of the kubelet that are under way are answered first.
    async fn drain(self) {
        self.kubelet_sockets.close();
        self.tasks.work.stop();
        self.kubelet_sockets.drain().await;
        self.hand_over().await;
    }

    /// Ends everything but the sockets by which a kubelet knows the drivers. The checkpoint is closed then.
    async fn hand_over(self) -> KubeletSockets {
        self.kubelet_sockets.hold();
        // Requests that wait for a device are answered now: the intake ends when its last call does.
        self.tasks.work.stop();
        let intake = self.tasks.intake.drain(limit::DRAIN).await;
        let work = self.tasks.work.drain(limit::DRAIN).await;
        let drivers = self.tasks.drivers.drain(limit::DRAIN).await;
        if !(intake && work && drivers) {
            tracing::warn!(
                "some tasks did not end in time; what they began is finished at the next start"
            );
        }
        self.admin.checkpoint.close().await;
        self.kubelet_sockets
    }
}

impl Sockets {
    async fn bind(config: &Config, listeners: &Listeners) -> Result<Self> {
        let paths = &config.paths;
        // An instance has the lock by now: another one, or its parent, may still have the sockets open, and does not accept.
        let open = async |path: &Path| {
            if config.instance.is_some() && !listeners.has(path) {
                socket::remove(path)?;
            }
            listeners.open(path).await.map(|opened| opened.listener)
        };
        let admin_address = match config.admin_address {
            Some(address) => Some(ListenAddress::bind(address, "admin.listen").await),
            None => None,
        };
        let local_api = match &config.local_api {
            Some(local) => Some(local::Listeners::bind(open(&paths.api).await?, local).await),
            None => None,
        };
        let users = match config
            .local_api
            .as_ref()
            .and_then(|local| local.users.as_ref())
        {
            Some(users) => {
                users::make_directory(&paths.users, users)?;
                let [node_api, api] = users::paths(&paths.users);
                let sockets = UserSockets {
                    node_api: open(&node_api).await?,
                    api: open(&api).await?,
                };
                users::open_sockets(&paths.users, users)?;
                Some(sockets)
            }
            None => None,
        };
        Ok(Self {
            local_api,
            users,
            node_api: open(&paths.socket).await?,
            pod_resources: open(&paths.pod_resources).await?,
            admin: socket::bind(&paths.admin).await?,
            admin_address,
            // Plugins that see this socket register at once, so it comes last.
            device_plugins: registration::listen(&paths.device_plugins).await?,
        })
    }
}

impl Built {
    async fn open(mut config: Config, boot_id: String) -> Result<Self> {
        config.hardware = config
            .hardware
            .clone()
            .with_own_directories(config.never_mounted());
        let (changes, tasks) = (Changes::default(), DaemonTasks::default());
        directories::prepare(&config.paths)?;
        let started_ms = now_ms();
        let conditions = Conditions::new(changes.clone());
        let paths = &config.paths;
        let cdi = CdiDir::open_with(
            &paths.cdi,
            &paths.cdi_spec_dirs,
            &paths.identity(),
            config.cdi.access,
        )?;
        let mut opened = state::open(&paths.checkpoint, &cdi, &conditions, |dump| {
            node_name::settle(&config.node, dump, &conditions)
        })?;
        failpoint::pass(Point::Recovered);
        config.rename_node(opened.dump.node.as_ref().map(|record| &record.name));
        let (paths, node) = (
            &config.paths,
            NodeFacts {
                name: config.node.name.to_string(),
                boot_id,
            },
        );
        let offers = match config.kubernetes {
            Some(_) => Some(StoredOffers::take(&mut opened.dump)),
            None => None,
        };
        let unreadable = opened.dump.unreadable_claims();
        let unreadable_names = opened.dump.unreadable_names();
        let table =
            ClaimTable::new(opened.dump.claims, opened.dump.pods).with_unreadable(unreadable);
        let claims = Arc::new(SharedClaimTable::new(
            table
                .with_released(opened.dump.released)
                .with_ended(opened.dump.ended),
        ));
        let recording = &config.recording;
        let recorded = recording.drivers.iter().map(RecordedName::to_string);
        let recordings = Recordings::start(&paths.recordings, recorded, recording.bytes_max)
            .context("set up the recordings of drivers")?;
        let settings = WasmSettings {
            cache: Some(CachePaths {
                directory: paths.cache.clone(),
                key: paths.cache_key.clone(),
            }),
            compiler: Compiler::this_program(),
            hardware: config.hardware.clone(),
            node: node.clone(),
            numa_node_form: config
                .kubernetes
                .as_ref()
                .map(|node| node.numa_node_form)
                .unwrap_or_default(),
            recordings: recordings.clone(),
        };
        let hardware = &config.hardware;
        let sysfs = hardware
            .open_sys()
            .with_context(|| format!("open {}", hardware.sys().display()))?;
        let sysfs = SysfsTree::new(sysfs);
        let values = RecordedValues::new(
            opened.dump.values,
            &node.boot_id,
            opened.checkpoint.clone(),
            sysfs,
        );
        let values = Arc::new(values);
        let host = WasmHost::new(settings, claims.clone(), values.clone())
            .context("set up the sandbox for drivers")?;
        let trust = Trust::new(config.drivers.policy.clone());
        let stored = &paths.kept_drivers;
        let previous_versions =
            PreviousVersions::open(stored, host.clone(), trust.clone(), tasks.drivers.clone())
                .context("look at the kept files of drivers")?;
        let previous_versions = Arc::new(previous_versions);
        let registry = Registry::new(
            changes.clone(),
            conditions.clone(),
            Some(previous_versions.clone()),
        );
        // The files are not read yet: a source that is not known may be there.
        registry.names.set_listed(false);
        {
            let records: Vec<_> = claims.lock().claims().cloned().collect();
            let known = names::evidence(
                records.iter().map(AsRef::as_ref),
                &previous_versions.sources(),
            );
            let (checkpoint, claims) = (opened.checkpoint.clone(), claims.clone());
            let records = opened.dump.names.clone();
            registry.names.load(
                NameStore { checkpoint, claims },
                records,
                unreadable_names,
                known,
            );
        }
        let local = match &config.local_api {
            Some(local) => {
                let (checkpoint, objects) = (opened.checkpoint.clone(), opened.dump.objects);
                Some(LocalApi::open(local.clone(), checkpoint, objects, registry.clone()).await?)
            }
            None => None,
        };
        let client = match &config.kubernetes {
            Some(kubernetes) => Some(cluster::client(kubernetes).await?),
            None => None,
        };
        let wasm = WasmFiles {
            registry,
            host,
            previous_versions,
            memory: FileMemory::default(),
            kernel: KernelEvents::default(),
            trust,
            conditions,
            tasks: tasks.drivers.clone(),
        };
        let (checkpoint, names) = (opened.checkpoint, opened.dump.names);
        let records = opened.dump.adapters.into_iter();
        let records = records.map(|record| (record.resource.clone(), record));
        let stored = StoredRecords::new(checkpoint.clone(), records.collect());
        let (adapters, adapter_files) = adapters::load(
            paths,
            hardware,
            config.kubernetes.as_ref(),
            &config.drivers.adapters,
            &wasm,
            &claims,
            stored,
        )
        .await?;
        let cdi_driver = cdi_driver::register(&config, &wasm, &claims)?;
        Ok(Self {
            adapters,
            adapter_files,
            cdi_driver,
            config,
            node,
            started_ms,
            changes,
            cdi,
            checkpoint,
            claims,
            names,
            values,
            wasm,
            client,
            offers,
            local,
            recordings,
            tasks,
        })
    }

    fn run(self, start: &Start, sockets: Sockets, is_alone: bool) -> Result<Daemon> {
        let Self {
            config,
            node,
            started_ms,
            changes,
            checkpoint,
            tasks,
            ..
        } = self;
        let (registry, conditions) = (self.wasm.registry.clone(), self.wasm.conditions.clone());
        let (recordings, previous_versions) =
            (self.recordings, self.wasm.previous_versions.clone());
        let (paths, intake, drivers) = (&config.paths, &tasks.intake, &tasks.drivers);
        if let Some(restarts) = start.restarts.clone().filter(|restarts| restarts.count > 0)
            && !start.is_reported.swap(true, Ordering::Relaxed)
        {
            intake.spawn_until_stopped("crash-report", report_crash(restarts, conditions.clone()));
        }
        let subject = paths.checkpoint.to_string_lossy().into_owned();
        let upkeep = checkpoint
            .clone()
            .keep(subject, conditions.clone(), intake.clone());
        intake.spawn("checkpoint-upkeep", upkeep);
        let pools = NodePools {
            names: PoolNames {
                node: config.node.name.clone(),
            },
            registry: registry.clone(),
        };
        let slice_settings = config.kubernetes.as_ref().map(|kubernetes| {
            let settings = watch::Sender::new(kubernetes.slices.clone());
            (settings, kubernetes.node_name.clone())
        });
        let connected = config
            .kubernetes
            .as_ref()
            .zip(self.client)
            .zip(slice_settings.as_ref())
            .map(|((kubernetes, client), (settings, _))| {
                Connected::new(
                    kubernetes.clone(),
                    client,
                    settings.subscribe(),
                    pools.clone(),
                    conditions.clone(),
                    intake.clone(),
                )
            });
        let adapters = self.adapters;
        adapters.start(intake);
        if let Some(driver) = self.cdi_driver {
            driver.start(intake);
        }
        let manager = Manager::new(ManagerParts {
            claims: self.claims,
            adapters: Some(adapters),
            checkpoint: checkpoint.clone(),
            values: self.values,
            cdi: self.cdi,
            registry: registry.clone(),
            source: claim_source(paths, &pools, connected.as_ref(), self.local.as_ref()),
            settings: manager_settings(&config, node.clone())?,
            changes: changes.clone(),
            conditions: conditions.clone(),
            tasks: tasks.work.clone(),
        });
        let (sender, events) = mpsc::channel(FILE_EVENTS_WAITING_MAX);
        intake.spawn(
            "cdi-directory",
            cdi_watch::watch(paths.cdi.clone(), intake.clone(), sender),
        );
        manager.devices.remember_owners(&self.names);
        manager.start(events);
        let images = watch::Sender::new(config.drivers.images.clone());
        let at_start = Arc::new(AtStart::look(
            &paths.drivers,
            images.subscribe(),
            &paths.plugins_registry,
        ));
        let adapters = watch::Sender::new(config.drivers.adapters.clone());
        let applying = (manager.clone(), intake.clone());
        let apply: ApplyAdapters = Box::new(move |entries| {
            let (manager, tasks) = applying.clone();
            async move { manager.apply_adapters(entries, &tasks).await }.boxed()
        });
        self.adapter_files
            .watch(adapters.subscribe(), apply, drivers);
        let live = LiveSettings {
            trust: self.wasm.trust.clone(),
            recordings: recordings.clone(),
            adapters,
            slices: slice_settings,
            images: LiveImages {
                images: images.clone(),
                hardware: config.hardware.clone(),
            },
        };
        watch_config(&config.file, drivers, live, conditions.clone());
        watch_drivers(
            &paths.drivers,
            images.subscribe(),
            &config.hardware,
            drivers,
            self.wasm,
        );
        let of_plugins = recordings.clone();
        let plugins = (
            registry.clone(),
            node.name.clone(),
            manager.devices.clone(),
            conditions.clone(),
        );
        serve_plugins(paths, drivers, plugins, of_plugins, sockets.device_plugins);
        let kubelet_sockets = match connected.zip(self.offers) {
            Some((connected, offers)) => {
                let parts = cluster::Parts {
                    paths,
                    listeners: start.listeners.clone(),
                    is_alone,
                    checkpoint: checkpoint.clone(),
                    manager: manager.clone(),
                    registry: registry.clone(),
                    changes: changes.clone(),
                    conditions: conditions.clone(),
                    at_start: at_start.clone(),
                    tasks: intake.clone(),
                };
                connected.start(&parts, offers)?
            }
            None => KubeletSockets::default(),
        };
        let local_claims = self.local.as_ref().map(|local| local.claims.clone());
        let device_names = DeviceNames::new(paths, config.cdi.access)?;
        let keep = device_names::keep(
            device_names.clone(),
            local_claims.clone(),
            conditions.clone(),
        );
        intake.spawn_until_stopped("device-names", keep);
        let (users_api, users_node_api) = match sockets.users {
            Some(UserSockets { node_api, api }) => {
                let connections = UserConnections::default();
                (
                    Some((api, connections.clone())),
                    Some((node_api, connections)),
                )
            }
            None => (None, None),
        };
        let local_taints = match self.local.zip(sockets.local_api) {
            Some((local, listeners)) => {
                let parts = local::Parts {
                    paths,
                    manager: manager.clone(),
                    registry: registry.clone(),
                    changes: changes.clone(),
                    conditions: conditions.clone(),
                    at_start: at_start.clone(),
                    tasks: intake.clone(),
                };
                Some(local.start(parts, listeners, users_api)?)
            }
            None => None,
        };
        let counters = Arc::new(pod_resources::Counters::default());
        let pod_resources = PodResources {
            manager: manager.clone(),
            pools: pools.clone(),
            counters: counters.clone(),
            tasks: intake.clone(),
        };
        let admin = Admin {
            registry: registry.clone(),
            manager: manager.clone(),
            checkpoint: checkpoint.clone(),
            conditions: conditions.clone(),
            pod_resources: counters,
            at_start,
            cluster: kubelet_sockets.cluster.clone(),
            local_claims: local_claims.clone(),
            restarts: start.restarts.as_ref().map(|restarts| restarts.count),
            tasks: intake.clone(),
        };
        let tasks_of_api = intake.clone();
        let api = NodeApi {
            manager,
            registry,
            pools,
            changes,
            conditions,
            checkpoint,
            node,
            taints: kubelet_sockets
                .cluster
                .as_ref()
                .map(|cluster| cluster.taints.clone())
                .or(local_taints),
            local_claims,
            is_for_users: false,
            device_names,
            recorded_hardware: config.hardware.is_simulated(),
            extended_resources: kubelet_sockets
                .cluster
                .as_ref()
                .map(|of| of.extended_resources.clone()),
            started_ms,
            recorded: RecordedDrivers {
                recordings,
                previous_versions,
                tasks: tasks_of_api.clone(),
            },
            tasks: tasks_of_api,
        };
        if let Some((listener, connections)) = users_node_api {
            intake.spawn(
                "users-node-api",
                node_api::serve_users(api.clone(), listener, connections),
            );
        }
        intake.spawn("node-api", node_api::serve(api, sockets.node_api));
        intake.spawn_until_stopped(
            "admin",
            admin::serve(admin.clone(), sockets.admin, sockets.admin_address),
        );
        intake.spawn(
            "pod-resources",
            pod_resources::serve(pod_resources, sockets.pod_resources),
        );
        Ok(Daemon {
            admin,
            kubelet_sockets,
            tasks,
        })
    }
}

/// Reports for a while that the daemon crashed and was started again.
async fn report_crash(restarts: Restarts, conditions: Conditions) {
    let Restarts { count, last } = restarts;
    let message = format!(
        "the daemon crashed and was started again ({count} since its parent started): {last}"
    );
    let code = ProblemCode::DaemonCrashed;
    conditions.set("daemon", Problem::unavailable(code, message));
    tokio::time::sleep(CRASH_REPORTED).await;
    conditions.clear(code, "daemon");
}

/// Returns the source of claims that a request only names. On a Kubernetes node this is the API server only: a file could describe a claim
/// that is gone.
fn claim_source(
    paths: &Paths,
    pools: &NodePools,
    connected: Option<&Connected>,
    local: Option<&LocalApi>,
) -> Arc<dyn ClaimSource> {
    match (connected, local) {
        (Some(connected), _) => connected.source(),
        (None, Some(local)) => Arc::new(local.claims.clone()),
        (None, None) => {
            let source = ClaimDirectory::new(paths.claims.clone());
            Arc::new(LocalizedClaims {
                source,
                pools: pools.clone(),
            })
        }
    }
}

fn manager_settings(config: &Config, node: NodeFacts) -> Result<ManagerSettings> {
    let online = config.hardware.sys().join("devices/system/node/online");
    let nodes = match std::fs::read_to_string(&online) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        nodes => Some(nodes.with_context(|| format!("read {}", online.display()))?),
    };
    Ok(ManagerSettings {
        node,
        exclusive_wait: config.claims.exclusive_wait,
        call_deadline: config.claims.call_deadline,
        pre_start_deadline: limit::PRE_START,
        resource_grace: limit::RESOURCE_GRACE,
        // A kernel without NUMA has no such file, and one node.
        numa_nodes: nodes
            .and_then(|text| devices::parse_nodes(&text))
            .unwrap_or_else(|| vec![0]),
        hardware: config.hardware.clone(),
        metadata: MetadataSettings {
            is_enabled: config.cdi.has_metadata,
            access: config.cdi.access,
            directory: device_metadata::directory_beside(
                &config.paths.cdi,
                &config.paths.identity(),
            ),
            pools: PoolNames {
                node: config.node.name.clone(),
            },
        },
        kubelet_allocates: config.kubernetes.is_some(),
    })
}

/// Applies changes of the config file to what takes effect at once.
fn watch_config(file: &FileConfig, tasks: &Tasks, live: LiveSettings, conditions: Conditions) {
    let Some(path) = file.path.clone() else {
        return;
    };
    // Of the directory and not of the file: tools replace the file by a new one, and a mounted ConfigMap changes a link beside it.
    let directory = path.parent().unwrap_or(Path::new("/")).to_owned();
    let (sender, reports) = mpsc::channel(1);
    let reload = Reload {
        path,
        started: file.started.clone(),
        live,
        conditions,
    };
    tasks.spawn_until_stopped("config", reload.run(reports));
    tasks.spawn(
        "config-directory",
        watched::changes(directory, tasks.clone(), sender),
    );
}

fn watch_drivers(
    directory: &Path,
    images: watch::Receiver<Vec<DriverImage>>,
    hardware: &Hardware,
    tasks: &Tasks,
    wasm: WasmFiles,
) {
    let kernel = wasm.kernel.clone();
    let (sender, events) = mpsc::channel(FILE_EVENTS_WAITING_MAX);
    if !hardware.is_simulated() {
        tasks.spawn(
            "uevents",
            kernel::read_uevents(tasks.clone(), kernel.clone()),
        );
    }
    tasks.spawn(
        "device-nodes",
        kernel::watch_nodes(hardware.dev(), tasks.clone(), kernel),
    );
    tasks.spawn("wasm-files", wasm.run(events));
    let watch = file_watch::watch(directory.to_owned(), images, tasks.clone(), sender);
    tasks.spawn("driver-directory", watch);
}

/// Native plugins, by both ways of registration.
fn serve_plugins(
    paths: &Paths,
    tasks: &Tasks,
    (registry, node, devices, conditions): (Registry, String, Arc<devices::Devices>, Conditions),
    recordings: Recordings,
    listener: UnixListener,
) {
    let (times, device_plugins) = (PluginTimes::default(), paths.device_plugins.clone());
    let endpoints = Endpoints::new(devices, times, recordings.clone(), tasks.clone());
    let (of_plugins, tasks_of_plugins) = (endpoints.clone(), tasks.clone());
    let plugins = Plugins {
        registry,
        node,
        endpoints: of_plugins,
        times,
        recordings,
        conditions,
        tasks: tasks_of_plugins,
    };
    let (sender, events) = mpsc::channel(FILE_EVENTS_WAITING_MAX);
    tasks.spawn_until_stopped("plugins", plugins.run(events));
    tasks.spawn(
        "plugin-directory",
        sockets::watch(paths.plugins_registry.clone(), tasks.clone(), sender),
    );
    let service = registration::serve(listener, device_plugins, endpoints, tasks.clone());
    tasks.spawn("device-plugin-api", service);
}
