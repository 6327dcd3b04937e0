//! The composition root: builds bottom-up, binds, runs, drains.

mod cluster;
mod reload;
mod state;
mod turns;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};

use anyhow::{Context, Result};
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;

use crate::admin::{self, Admin, AtStart};
use crate::config::Config;
use crate::config_watch as config_file;
use crate::node_api::{self, NodeApi};
use crate::pod_resources::{self, PodResources};
use nodedock_base::changes::Changes;
use nodedock_base::clock::now_ms;
use nodedock_base::conditions::Conditions;
use nodedock_base::failpoint::{self, Point};
use nodedock_base::socket;
use nodedock_base::tasks::Tasks;
use nodedock_core::cdi::{CdiDir, Durability};
use nodedock_core::cdi_watch::{self, SpecEvent};
use nodedock_core::checkpoint::Checkpoint;
use nodedock_core::driver::NodeFacts;
use nodedock_core::manager::claims::RecordedValues;
use nodedock_core::manager::claims::source::{ClaimDirectory, ClaimSource};
use nodedock_core::manager::claims::table::ClaimTable;
use nodedock_core::manager::devices;
use nodedock_core::manager::{Manager, ManagerParts, ManagerSettings};
use nodedock_core::registry::Registry;
use nodedock_core::sysfs::SysfsTree;
use nodedock_model::limit;
use nodedock_native::device_plugins::DevicePlugins;
use nodedock_native::endpoints::Endpoints;
use nodedock_native::grpc::PluginSteps;
use nodedock_native::plugins::{PluginTimes, Plugins};
use nodedock_native::registration;
use nodedock_native::sockets;
use nodedock_wasm::file_watch;
use nodedock_wasm::kernel::{self, KernelEvents};
use nodedock_wasm::registry::previous_versions::PreviousVersions;
use nodedock_wasm::registry::wasm_files::{FileMemory, WasmFiles};
use nodedock_wasm::trust::Trust;
use nodedock_wasm::{Compiler, StoredFiles, WasmHost, WasmSettings};

use self::cluster::{Connected, KubeletSockets};
use self::reload::Reload;

/// File events that may wait for the registry.
const FILE_EVENTS_WAITING_MAX: usize = 64;

/// Runs the daemon until SIGTERM or SIGINT, then drains it.
pub async fn run(config: Config, boot_id: String) -> Result<()> {
    let mut signals = Signals::new()?;
    if let Some(instance) = config.instance.clone() {
        return Box::pin(turns::run(config, boot_id, instance, signals)).await;
    }
    let daemon = Daemon::start(config, boot_id).await?;
    say_ready();
    signals.wanted().await;
    stop(daemon, &mut signals).await;
    Ok(())
}

fn say_ready() {
    // A machine without systemd has nobody to tell.
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
        () = signals.wanted() => tracing::warn!("stopping at once"),
    }
    tracing::info!("stopped");
}

/// This boot's ID.
pub fn boot_id() -> Result<String> {
    let path = "/proc/sys/kernel/random/boot_id";
    let text = std::fs::read_to_string(path).with_context(|| format!("read {path}"))?;
    Ok(text.trim().to_owned())
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> Result<Self> {
        let terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
        let interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
        Ok(Self { terminate, interrupt })
    }

    async fn wanted(&mut self) {
        tokio::select! {
            // Either will do, and a signal that is not received here stays pending.
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

struct Daemon {
    /// What metrics and probes read.
    admin: Admin,
    /// The sockets that a kubelet knows.
    kubelet_sockets: KubeletSockets,
    /// What brings new work: the API.
    intake: Tasks,
    /// Requests under way.
    work: Tasks,
    /// Discovery, the drivers' keepers, the connections to plugins: requests under way need them to the end.
    drivers: Tasks,
    checkpoint: Checkpoint,
}

impl Daemon {
    async fn start(config: Config, boot_id: String) -> Result<Self> {
        prepare_folders(&config)?;
        let node = NodeFacts { name: config.node_name.clone(), boot_id };
        let started_ms = now_ms();
        let (intake, work, drivers, changes) = (Tasks::new(), Tasks::new(), Tasks::new(), Changes::default());
        let conditions = Conditions::new(changes.clone());
        // Several daemons may write to one folder: each is known by where its record is.
        let daemon = config.paths.checkpoint.to_string_lossy();
        let paths = &config.paths;
        let cdi = CdiDir::open_among(&paths.cdi, &paths.cdi_spec_dirs, &daemon, Durability::Synced)?;
        let opened = state::open(&paths.checkpoint, &cdi, &conditions).await?;
        failpoint::pass(Point::Recovered);
        let keeper = opened.checkpoint.clone().keep(daemon.into_owned(), conditions.clone(), intake.clone());
        intake.spawn("checkpoint-keeper", keeper);
        let listener = socket::bind(&config.paths.socket).await?;
        let pod_resources_listener = socket::bind(&config.paths.pod_resources).await?;
        let admin_listener = socket::bind(&config.paths.admin).await?;
        let admin_address = listen(config.admin_address).await?;
        let unreadable = opened.unreadable_claims();
        let table = ClaimTable::new(opened.claims, opened.pods).with_unreadable(unreadable);
        let table = Arc::new(Mutex::new(table.with_released(opened.released)));
        let settings = WasmSettings {
            cache_dir: Some(config.paths.cache.clone()),
            compiler: Compiler::this_program(),
            sysfs_root: "/sys".into(),
            dev_root: "/dev".into(),
            node: node.clone(),
        };
        let sysfs = SysfsTree::open(&settings.sysfs_root).context("open /sys")?;
        let values = RecordedValues::new(opened.values, &node.boot_id, opened.checkpoint.clone(), sysfs);
        let values = Arc::new(values);
        let host = WasmHost::new(settings, table.clone(), values.clone())
            .context("set up the sandbox for drivers")?;
        let registry = Registry::with_conditions(changes.clone(), conditions.clone());
        let trust = Trust::new(config.file.policy.clone());
        let kept = StoredFiles::open(&config.paths.kept_drivers)
            .and_then(|files| PreviousVersions::open(files, host.clone(), trust.clone(), drivers.clone()))
            .context("look at the kept files of drivers")?;
        let predecessors = Arc::new(kept);
        registry.keep_predecessors(predecessors.clone());
        let connected = match &config.kubernetes {
            Some(kubernetes) => Some(cluster::connect(kubernetes, &registry, &conditions, &intake).await?),
            None => None,
        };
        let manager = Manager::new(ManagerParts {
            claims: table,
            allocations: opened.allocations,
            checkpoint: opened.checkpoint.clone(),
            values,
            cdi,
            registry: registry.clone(),
            source: claim_source(&config, connected.as_ref()),
            settings: manager_settings(&config, node.clone()),
            changes: changes.clone(),
            conditions: conditions.clone(),
            tasks: work.clone(),
        });
        manager.start(watch_specs(&config, &intake));
        let at_start = Arc::new(AtStart::look(&config.paths.drivers, &config.paths.plugins_registry));
        watch_config(&config, &drivers, trust.clone(), conditions.clone());
        let wasm = WasmFiles {
            registry: registry.clone(),
            host,
            previous_versions: predecessors,
            memory: FileMemory::default(),
            kernel: KernelEvents::default(),
            trust,
            conditions: conditions.clone(),
            tasks: drivers.clone(),
        };
        watch_drivers(&config, &drivers, wasm);
        let device_plugins = DevicePlugins::default();
        watch_plugins(&config, &drivers, registry.clone(), device_plugins.clone());
        serve_device_plugins(&config, &drivers, manager.clone(), device_plugins).await?;
        let counters = Arc::new(pod_resources::Counters::default());
        let pod_resources =
            PodResources { manager: manager.clone(), counters: counters.clone(), tasks: intake.clone() };
        let kubelet_sockets = match connected {
            Some(connected) => connected.start(&cluster::Parts {
                config: &config,
                manager: manager.clone(),
                registry: registry.clone(),
                changes: changes.clone(),
                conditions: conditions.clone(),
                at_start: at_start.clone(),
                tasks: intake.clone(),
            })?,
            None => KubeletSockets::default(),
        };
        let admin = Admin {
            registry: registry.clone(),
            manager: manager.clone(),
            checkpoint: opened.checkpoint.clone(),
            conditions: conditions.clone(),
            pod_resources: counters,
            at_start,
            cluster: kubelet_sockets.cluster(),
            tasks: intake.clone(),
        };
        let api = NodeApi {
            manager,
            registry,
            changes,
            conditions,
            checkpoint: opened.checkpoint.clone(),
            node,
            started_ms,
            tasks: intake.clone(),
        };
        intake.spawn("node-api", node_api::serve(api, listener));
        intake.spawn("admin", admin::serve(admin.clone(), admin_listener, admin_address));
        intake.spawn("pod-resources", pod_resources::serve(pod_resources, pod_resources_listener));
        Ok(Self { admin, kubelet_sockets, intake, work, drivers, checkpoint: opened.checkpoint })
    }

    async fn drain(self) {
        self.kubelet_sockets.close();
        self.hand_over().await.drain().await;
    }

    /// Ends all but the sockets that a kubelet knows. The checkpoint is closed then.
    async fn hand_over(self) -> KubeletSockets {
        self.kubelet_sockets.hold();
        // Requests that wait for a device are answered now: the intake ends when its last call does.
        self.work.stop();
        let intake = self.intake.drain(limit::DRAIN).await;
        let work = self.work.drain(limit::DRAIN).await;
        let drivers = self.drivers.drain(limit::DRAIN).await;
        if !(intake && work && drivers) {
            tracing::warn!("some tasks did not end in time; what they began is finished at the next start");
        }
        self.checkpoint.close().await;
        self.kubelet_sockets
    }
}

/// Where claims are read that a request only names. On a Kubernetes node the API server alone knows of them: a file that lies about
/// could stand for a claim that is gone.
fn claim_source(config: &Config, connected: Option<&Connected>) -> Arc<dyn ClaimSource> {
    match connected {
        Some(connected) => connected.source(),
        None => Arc::new(ClaimDirectory::new(config.paths.claims.clone())),
    }
}

fn manager_settings(config: &Config, node: NodeFacts) -> ManagerSettings {
    let nodes = std::fs::read_to_string("/sys/devices/system/node/online").ok();
    ManagerSettings {
        node,
        exclusive_wait: config.claims.exclusive_wait,
        call_deadline: config.claims.call_deadline,
        pre_start_deadline: limit::PRE_START,
        resource_grace: limit::RESOURCE_GRACE,
        // A kernel without NUMA has no such file, and one node.
        numa_nodes: nodes.and_then(|text| devices::parse_nodes(&text)).unwrap_or_else(|| vec![0]),
        host_root: "/".into(),
    }
}

/// Binds the address for metrics and probes, if there is to be one.
async fn listen(address: Option<SocketAddr>) -> Result<Option<TcpListener>> {
    let Some(address) = address else { return Ok(None) };
    let listener = TcpListener::bind(address).await;
    listener.map(Some).with_context(|| format!("listen on {address} (admin.listen of the config)"))
}

fn watch_config(config: &Config, tasks: &Tasks, trust: Trust, conditions: Conditions) {
    let Some(path) = config.file_path.clone() else { return };
    let (sender, events) = mpsc::channel(1);
    let reload = Reload { path: path.clone(), started: config.file.clone(), trust, conditions };
    tasks.spawn("config", reload.follow(events));
    tasks.spawn("config-file", config_file::watch(path, tasks.clone(), sender));
}

fn watch_drivers(config: &Config, tasks: &Tasks, wasm: WasmFiles) {
    let kernel = wasm.kernel.clone();
    let (sender, events) = mpsc::channel(FILE_EVENTS_WAITING_MAX);
    tasks.spawn("uevents", kernel::read_uevents(tasks.clone(), kernel.clone()));
    tasks.spawn("device-nodes", kernel::watch_nodes("/dev".into(), tasks.clone(), kernel));
    tasks.spawn("wasm-files", wasm.run(events));
    tasks.spawn("driver-folder", file_watch::watch(config.paths.drivers.clone(), tasks.clone(), sender));
}

fn watch_plugins(config: &Config, tasks: &Tasks, registry: Registry, device_plugins: DevicePlugins) {
    let (sender, events) = mpsc::channel(FILE_EVENTS_WAITING_MAX);
    let plugins = Plugins { registry, device_plugins, times: PluginTimes::default(), tasks: tasks.clone() };
    tasks.spawn("plugins", plugins.run(events));
    tasks
        .spawn("plugin-folder", sockets::watch(config.paths.plugins_registry.clone(), tasks.clone(), sender));
}

fn watch_specs(config: &Config, tasks: &Tasks) -> mpsc::Receiver<SpecEvent> {
    let (sender, events) = mpsc::channel(FILE_EVENTS_WAITING_MAX);
    tasks.spawn("cdi-folder", cdi_watch::watch(config.paths.cdi.clone(), tasks.clone(), sender));
    events
}

/// Device plugins, by both ways of registration. Those that see the new socket register as soon as it is there, so this comes last.
async fn serve_device_plugins(
    config: &Config,
    tasks: &Tasks,
    manager: Arc<Manager>,
    registered: DevicePlugins,
) -> Result<()> {
    let folder = config.paths.device_plugins.clone();
    let listener = registration::listen(&folder).await?;
    let endpoints = Endpoints::new(manager, PluginSteps::default(), tasks.clone());
    tasks.spawn("device-plugin-sockets", endpoints.clone().follow(registered));
    tasks.spawn("device-plugin-api", registration::serve(listener, folder, endpoints, tasks.clone()));
    Ok(())
}

fn prepare_folders(config: &Config) -> Result<()> {
    let paths = &config.paths;
    for folder in [&paths.drivers, &paths.plugins_registry, &paths.kept_drivers, &paths.claims, &paths.cache]
    {
        make_private(folder)?;
    }
    for file in [&paths.checkpoint, &paths.socket, &paths.pod_resources, &paths.admin] {
        make_private(file.parent().unwrap_or(Path::new("/")))?;
    }
    Ok(())
}

/// Makes a folder that only the daemon's user enters. One that is there already keeps its mode.
fn make_private(folder: &Path) -> Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    let parents = folder.parent().map_or(Ok(()), std::fs::create_dir_all);
    let made = parents.and_then(|()| std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder));
    made.with_context(|| format!("make the folder {}: choose a --root that can be written", folder.display()))
}
