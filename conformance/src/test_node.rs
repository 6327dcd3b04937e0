//! The environment of a driver: directories, an API server, and the directory of a kubelet.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use nodedock_proto::kubelet::device_plugin::v1beta1::RegisterRequest;
use nodedock_proto::kubelet::device_plugin::v1beta1::device_plugin_client::DevicePluginClient;
use nodedock_proto::kubelet::registration::registration_client::RegistrationClient;
use nodedock_proto::kubelet::registration::{InfoRequest, PluginInfo, RegistrationStatus};
use nodedock_proto::node::v1;
use nodedock_stand_ins::api_server::{Allocated, ApiServer, Pod};
use nodedock_stand_ins::kubelet::{ClaimRef, authority};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::time::Instant;
use tonic::transport::Channel;

use crate::daemon::Daemon;
use crate::device_plugin::{AT_ONCE, Registrations};
use crate::files::{self, empty, sockets};
use crate::mounts;
use crate::process::{self, Output, Process};
use crate::published::{DeviceId, devices, is_complete};
use crate::wire::{Client, Log, Version};
use crate::{Options, Program, Running, Target, placeholders};

pub(crate) const NODE: &str = "node-1";
pub(crate) const NAMESPACE: &str = "default";
pub(crate) const REQUEST: &str = "device";

/// Time between two checks of a driver's own activity.
const LOOK: Duration = Duration::from_millis(20);
/// Time between two questions to a daemon about a driver that has not registered.
const ASK: Duration = Duration::from_millis(500);
/// A driver that has written no slice for so long has published what it has.
const SETTLE: Duration = Duration::from_secs(1);
/// Deadline of GetInfo, as in a kubelet, and deadline of the notification.
const GET_INFO: Duration = Duration::from_secs(1);
const NOTIFY: Duration = Duration::from_secs(5);
/// Number of last requests to the API server that are shown.
const REQUESTS_SHOWN: usize = 40;
/// Number of last lines of the driver's output that are shown.
const LINES_SHOWN: usize = 100;
/// Deadline for unpreparing all claims of a case after it.
const RELEASE: Duration = Duration::from_secs(60);
/// Time for a driver to end after SIGTERM, where a case is not about that.
pub(crate) const STOP: Duration = Duration::from_secs(10);

/// The driver, as it registered.
#[derive(Debug, Clone)]
pub(crate) struct Plugin {
    pub(crate) name: String,
    pub(crate) services: Vec<String>,
    pub(crate) socket: PathBuf,
    pub(crate) client: Client,
    /// The driver's response to the notification of its registration.
    pub(crate) notified: Result<(), String>,
}

impl Plugin {
    /// The versions of the DRA API that it lists.
    pub(crate) fn versions(&self) -> impl Iterator<Item = Version> {
        Version::listed(&self.services)
    }
}

/// The directories of a node, below a root of their own.
#[derive(Debug)]
pub(crate) struct Directories {
    kubelet: PathBuf,
    dir: TempDir,
}

impl Directories {
    pub(crate) fn root(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn registry(&self) -> PathBuf {
        self.kubelet.join("plugins_registry")
    }

    fn plugins(&self) -> PathBuf {
        self.kubelet.join("plugins")
    }

    pub(crate) fn cdi(&self) -> PathBuf {
        self.root().join("var/run/cdi")
    }

    pub(crate) fn state(&self) -> PathBuf {
        self.root().join("var/lib/driver")
    }

    /// The containerEdits of each CDI device by its qualified name.
    pub(crate) fn cdi_devices(&self) -> Result<BTreeMap<String, Value>> {
        files::cdi_devices(&self.cdi())
    }

    /// Makes the directories that a kubelet and a container runtime have.
    fn make(&self) -> Result<()> {
        for path in [
            self.registry(),
            self.plugins(),
            self.kubelet.join("device-plugins"),
            self.kubelet.join("pod-resources"),
            self.cdi(),
            self.state(),
        ] {
            std::fs::create_dir_all(&path).with_context(|| format!("make {}", path.display()))?;
        }
        Ok(())
    }
}

#[derive(Debug)]
pub(crate) struct TestNode {
    pub(crate) options: Options,
    pub(crate) api: ApiServer,
    pub(crate) log: Log,
    pub(crate) process: Option<Process>,
    pub(crate) registrations: Registrations,
    pub(crate) directories: Directories,
    output: Output,
    boot: usize,
    /// The words before the driver's command since the last reboot.
    in_boot: Vec<String>,
    /// The state directory has the modes of one that cannot be written, nor be deleted by its owner.
    is_read_only: bool,
    started: usize,
    claims: usize,
    made: Vec<ClaimRef>,
    /// When a daemon was last asked about a driver that has not registered.
    asked: Option<Instant>,
}

impl TestNode {
    pub(crate) async fn new(options: &Options) -> Result<Self> {
        let dir = tempfile::Builder::new()
            .prefix("ndc-")
            .tempdir()
            .context("make a directory for a driver")?;
        let kubelet = match &options.target {
            // About as long as /var/lib/kubelet: names of sockets have the room that they have on a node.
            Target::Program(_) => dir.path().join("k"),
            Target::Running(running) => running.kubelet.clone(),
        };
        let api = ApiServer::start().await;
        api.add_node(NODE);
        api.report_kubelet(NODE, "v1.36.2", json!({}));
        let log = Log::default();
        let registrations = Registrations::new(&kubelet.join("device-plugins"), &log);
        let mut node = Self {
            options: options.clone(),
            api,
            log,
            process: None,
            registrations,
            directories: Directories { kubelet, dir },
            output: Output::default(),
            boot: 0,
            in_boot: Vec::new(),
            is_read_only: false,
            started: 0,
            claims: 0,
            made: Vec::new(),
            asked: None,
        };
        if let Target::Running(Running {
            kubeconfig: Some(path),
            ..
        }) = &options.target
        {
            let written = node.api.kubeconfig(node.directories.root());
            let content = std::fs::read(written)?;
            let file =
                std::fs::File::create_new(path).and_then(|mut file| file.write_all(&content));
            file.with_context(|| format!("write {}", path.display()))?;
        }
        if let Target::Program(program) = &options.target {
            node.directories.make()?;
            node.api.kubeconfig(node.directories.root());
            for (path, content) in &program.files {
                let path = node.directories.root().join(path);
                files::make_directory(path.parent().unwrap_or(&path))?;
                std::fs::write(&path, content)
                    .with_context(|| format!("write {}", path.display()))?;
            }
            node.registrations.serve().await?;
        }
        Ok(node)
    }

    fn value(&self, placeholder: &str) -> String {
        let directories = &self.directories;
        let path = |path: PathBuf| path.display().to_string();
        match placeholder {
            "root" => path(directories.root().to_owned()),
            "kubelet" => path(directories.kubelet.clone()),
            "plugins" => path(self.directories.plugins()),
            "registry" => path(self.directories.registry()),
            "device-plugins" => path(directories.kubelet.join("device-plugins")),
            "cdi" => path(self.directories.cdi()),
            "state" => path(self.directories.state()),
            "kubeconfig" => path(directories.root().join("kubeconfig")),
            "api" => self.api.url(),
            "node" => NODE.to_owned(),
            "boot" => boot_id(self.boot),
            "instance" => format!("11111111-0000-4000-8000-{:012}", self.started),
            other => format!("{{{other}}}"),
        }
    }

    fn filled(&self, word: &str) -> String {
        placeholders(word).fold(word.to_owned(), |filled, name| {
            filled.replace(&format!("{{{name}}}"), &self.value(name))
        })
    }

    fn program(&self) -> Result<&Program> {
        match &self.options.target {
            Target::Program(program) => Ok(program),
            Target::Running(_) => bail!("the driver was started by others"),
        }
    }

    /// Starts the driver's program; of one that runs already nothing is done.
    pub(crate) fn start(&mut self) -> Result<()> {
        self.start_in(&self.in_boot.clone())
    }

    /// Starts the driver's program as the arguments of a command, which becomes the program.
    fn start_in(&mut self, wrapper: &[String]) -> Result<()> {
        let Ok(program) = self.program() else {
            return Ok(());
        };
        let command = program.command.iter().map(|word| self.filled(word));
        let command: Vec<String> = wrapper.iter().cloned().chain(command).collect();
        self.started += 1;
        self.log.add(format!("start {}", command.join(" ")));
        self.process = Some(Process::start(&command, &self.output)?);
        Ok(())
    }

    /// Starts the driver with a state directory that it cannot write. Answers why that is not possible here.
    pub(crate) async fn start_read_only(&mut self) -> Result<Option<String>> {
        if !rustix::process::geteuid().is_root() {
            self.is_read_only = true;
            files::set_writable(&self.directories.state(), false)?;
            return self.start().map(|()| None);
        }
        match mounts::read_only(&self.directories.state()).await {
            Ok(wrapper) => self.start_in(&wrapper).map(|()| None),
            Err(why) => Ok(Some(format!(
                "root may not make a directory read-only here: {why}"
            ))),
        }
    }

    /// Ends what [`TestNode::start_read_only`] did to the state directory.
    pub(crate) fn make_writable(&mut self) -> Result<()> {
        files::set_writable(&self.directories.state(), true)?;
        self.is_read_only = false;
        Ok(())
    }

    /// Waits until the driver has registered, or has ended: then `None`.
    pub(crate) async fn registered_or_ended(&mut self) -> Result<Option<Plugin>> {
        let end = Instant::now() + self.options.start_timeout;
        loop {
            if let Some(process) = &mut self.process
                && process.ended().await.is_some()
            {
                return Ok(None);
            }
            match self.look_for(None).await {
                Ok(plugin) => return Ok(Some(plugin)),
                Err(why) if Instant::now() >= end => {
                    return Err(why.context("the driver neither registers nor ends"));
                }
                Err(_) => tokio::time::sleep(LOOK).await,
            }
        }
    }

    /// Starts the driver, and waits until it has registered.
    pub(crate) async fn begin(&mut self) -> Result<Plugin> {
        self.start()?;
        self.registered(None).await
    }

    /// Ends the driver by SIGTERM.
    pub(crate) async fn stop(&mut self) -> Result<()> {
        self.stop_within(STOP).await
    }

    pub(crate) async fn stop_within(&mut self, time: Duration) -> Result<()> {
        self.log.add("stop");
        match self.process.take() {
            Some(process) => process.stop(time).await,
            None => bail!("the driver does not run"),
        }
    }

    pub(crate) async fn kill(&mut self) {
        self.log.add("kill");
        if let Some(process) = self.process.take() {
            process.kill().await;
        }
    }

    pub(crate) async fn restart(&mut self) -> Result<Plugin> {
        // One that does not end in time is killed: another case is about that.
        let _ = self.stop().await;
        self.begin().await
    }

    pub(crate) async fn crash(&mut self) -> Result<Plugin> {
        self.kill().await;
        self.begin().await
    }

    /// The node's end and its next boot, before the driver starts. Answers why that is not possible here.
    pub(crate) async fn reboot(&mut self) -> Result<Option<String>> {
        self.kill().await;
        self.boot += 1;
        self.log
            .add(format!("reboot, the boot ID is now {}", self.value("boot")));
        empty(&self.directories.cdi())?;
        if self.program()?.names("boot") {
            return Ok(None);
        }
        let file = self.directories.root().join("boot-id");
        std::fs::write(&file, format!("{}\n", self.value("boot"))).context("write a boot ID")?;
        match mounts::boot_id(&file).await {
            Ok(wrapper) => self.in_boot = wrapper,
            Err(why) => {
                let why = format!(
                    "its command does not name {{boot}}, and the kernel's boot ID cannot be another here: {why}"
                );
                return Ok(Some(why));
            }
        }
        Ok(None)
    }

    /// Waits until a DRA driver has registered on another socket than `before`.
    pub(crate) async fn registered(&mut self, before: Option<&Path>) -> Result<Plugin> {
        let end = Instant::now() + self.options.start_timeout;
        loop {
            match self.look_for(before).await {
                Ok(plugin) => return Ok(plugin),
                Err(why) => self.wait(end, &why).await?,
            }
        }
    }

    /// Waits until a DRA driver answers GetInfo, or a device plugin has called Register.
    pub(crate) async fn announced(&mut self) -> Result<Option<(PathBuf, PluginInfo)>> {
        let end = Instant::now() + self.options.start_timeout;
        loop {
            match self.look_for_info().await {
                Ok(found) => return Ok(Some(found)),
                Err(_) if self.registrations.newest().is_some() => return Ok(None),
                Err(why) => self.wait(end, &why).await?,
            }
        }
    }

    /// The first socket that answers GetInfo as a DRA driver, now.
    pub(crate) async fn look_for_info(&mut self) -> Result<(PathBuf, PluginInfo)> {
        let mut why = self.no_socket();
        for socket in sockets(&self.directories.registry()) {
            match self.info(&socket).await {
                Ok((_, info)) => return Ok((socket, info)),
                Err(error) => why = error.context(socket.display().to_string()),
            }
        }
        Err(why)
    }

    fn no_socket(&self) -> anyhow::Error {
        anyhow!(
            "there is no socket in {}",
            self.directories.registry().display()
        )
    }

    /// Waits until a device plugin has registered and listens.
    pub(crate) async fn device_plugin(
        &mut self,
    ) -> Result<(RegisterRequest, DevicePluginClient<Channel>)> {
        let end = Instant::now() + self.options.start_timeout;
        loop {
            let why = match self.registrations.newest() {
                None => anyhow!("it did not call Register"),
                Some(request) => match self.registrations.dial(&request).await {
                    Ok(client) => return Ok((request, client)),
                    Err(why) => why,
                },
            };
            self.wait(end, &why).await?;
        }
    }

    /// Registers what is at one of the sockets now.
    pub(crate) async fn look_for(&mut self, before: Option<&Path>) -> Result<Plugin> {
        let mut why = self.no_socket();
        for socket in sockets(&self.directories.registry())
            .into_iter()
            .filter(|socket| Some(socket.as_path()) != before)
        {
            match self.register(&socket).await {
                Ok(plugin) => return Ok(plugin),
                Err(error) => why = error.context(socket.display().to_string()),
            }
        }
        Err(why)
    }

    /// A moment until the next look. Fails when the time is over, or the driver has ended.
    async fn wait(&mut self, end: Instant, why: &anyhow::Error) -> Result<()> {
        if let Some(process) = &mut self.process
            && let Some(ended) = process.ended().await
        {
            bail!(
                "the driver ended before it registered: {}",
                process::end(ended)
            );
        }
        if let Some(refusal) = self.refusal().await {
            bail!("the driver cannot be loaded: {refusal}");
        }
        let left = end.saturating_duration_since(Instant::now());
        ensure!(
            !left.is_zero(),
            "the driver did not register within {:?}: {why:#}",
            self.options.start_timeout
        );
        tokio::time::sleep(LOOK.min(left)).await;
        Ok(())
    }

    /// Connects to the registration socket of a DRA driver and asks what it is.
    async fn info(&self, socket: &Path) -> Result<(RegistrationClient<Channel>, PluginInfo)> {
        let mut client = registration(socket).await?;
        let info = get_info(&mut client).await?;
        ensure!(
            info.r#type == "DRAPlugin",
            "the plugin's type is {:?}, not \"DRAPlugin\"",
            info.r#type
        );
        if let Some(driver) = &self.options.driver {
            ensure!(
                info.name == *driver,
                "the driver's name is {:?}, not {driver:?}",
                info.name
            );
        }
        Ok((client, info))
    }

    pub(crate) async fn register(&self, socket: &Path) -> Result<Plugin> {
        let (mut registration, info) = self.info(socket).await?;
        let PluginInfo {
            name,
            endpoint,
            supported_versions: services,
            ..
        } = info;
        self.log
            .add(format!("GetInfo: {name} at {endpoint}, {services:?}"));
        let client = self.dial(Path::new(&endpoint)).await?;
        let status = RegistrationStatus {
            plugin_registered: true,
            error: String::new(),
        };
        let notified =
            match tokio::time::timeout(NOTIFY, registration.notify_registration_status(status))
                .await
            {
                Ok(Ok(_)) => Ok(()),
                Ok(Err(status)) => Err(format!("{:?}: {}", status.code(), status.message())),
                Err(_) => Err(format!("it is not answered within {NOTIFY:?}")),
            };
        Ok(Plugin {
            name,
            services,
            socket: socket.to_owned(),
            client,
            notified,
        })
    }

    /// Connects at once to a driver's endpoint.
    pub(crate) async fn dial(&self, endpoint: &Path) -> Result<Client> {
        let client = Client::dial(endpoint, AT_ONCE, self.options.call_timeout, &self.log);
        client.await.context("its endpoint")
    }

    /// The slices of a driver, when its pools are complete and it has written none for a while; none if it has published none in time.
    pub(crate) async fn slices(&self, driver: &str) -> Vec<Value> {
        let end = Instant::now() + self.options.slices_timeout;
        let (mut known, mut since) = (Vec::new(), Instant::now());
        loop {
            let slices = self.slices_now(driver);
            let now = Instant::now();
            if slices != known {
                (known, since) = (slices, now);
            }
            let is_over = now >= end;
            if is_complete(&known) && (is_over || now >= since + SETTLE) {
                return known;
            }
            if is_over {
                return Vec::new();
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// The slices of a driver as soon as they are as wanted.
    pub(crate) async fn slices_until(
        &self,
        driver: &str,
        time: Duration,
        mut is_wanted: impl FnMut(&[Value]) -> bool,
    ) -> Option<Vec<Value>> {
        let end = Instant::now() + time;
        loop {
            let slices = self.slices_now(driver);
            if is_wanted(&slices) {
                return Some(slices);
            }
            if Instant::now() >= end {
                return None;
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    pub(crate) fn slices_now(&self, driver: &str) -> Vec<Value> {
        self.api
            .look(|state| state.slices(driver).into_iter().cloned().collect())
    }

    /// Devices that can be allocated together, as far as slices say: those that share counters come last.
    pub(crate) async fn devices(&self, plugin: &Plugin) -> Result<Vec<DeviceId>> {
        if !self.options.devices.is_empty() {
            let named = self.options.devices.iter();
            return Ok(named
                .map(|(pool, name)| DeviceId {
                    pool: pool.clone(),
                    name: name.clone(),
                })
                .collect());
        }
        // The first pool will do.
        let time = self.options.slices_timeout;
        let slices = self.slices_until(&plugin.name, time, |slices| {
            is_complete(slices) && !devices(slices).is_empty()
        });
        // no error: without slices there is no device, which is an error
        let devices = devices(&slices.await.unwrap_or_default());
        ensure!(
            !devices.is_empty(),
            "the driver publishes no ResourceSlice with a device: name one of its devices (--device POOL/DEVICE)"
        );
        Ok(devices)
    }

    /// A new claim for a device of a driver, as the scheduler leaves it.
    pub(crate) fn claim(&mut self, plugin: &Plugin, device: &DeviceId) -> ClaimRef {
        self.allocate(plugin, device, false)
    }

    /// New claims for devices of a driver, reserved for one pod, which is returned too. `parameters` are those of the last claim.
    pub(crate) fn claims_of_a_pod(
        &mut self,
        plugin: &Plugin,
        devices: &[DeviceId],
        parameters: Option<&Value>,
    ) -> (v1::ObjectRef, Vec<ClaimRef>) {
        let name = format!("pod-of-{}", self.claims + 1);
        let uid = self.api.add_pod(Pod::new(NAMESPACE, &name, NODE));
        let own = self.options.parameters.clone();
        let mut claims = Vec::new();
        for (index, device) in devices.iter().enumerate() {
            if let Some(parameters) = parameters.filter(|_| index + 1 == devices.len()) {
                self.options.parameters = Some(parameters.clone());
            }
            claims.push(self.allocate_for(plugin, device, false, (name.as_str(), uid.as_str())));
        }
        self.options.parameters = own;
        let pod = v1::ObjectRef {
            namespace: NAMESPACE.to_owned(),
            name,
            uid,
        };
        (pod, claims)
    }

    /// A new claim with admin access.
    pub(crate) fn admin_claim(&mut self, plugin: &Plugin, device: &DeviceId) -> ClaimRef {
        self.allocate(plugin, device, true)
    }

    fn allocate(&mut self, plugin: &Plugin, device: &DeviceId, is_admin: bool) -> ClaimRef {
        let pod = format!("pod-{}", self.claims + 1);
        let pod_uid = self.api.add_pod(Pod::new(NAMESPACE, &pod, NODE));
        self.allocate_for(plugin, device, is_admin, (pod.as_str(), pod_uid.as_str()))
    }

    /// `pod`: name and UID of the one that the claim is reserved for.
    fn allocate_for(
        &mut self,
        plugin: &Plugin,
        device: &DeviceId,
        is_admin: bool,
        (pod, pod_uid): (&str, &str),
    ) -> ClaimRef {
        self.claims += 1;
        let name = format!("claim-{}", self.claims);
        let mut result = json!({ "request": REQUEST, "driver": plugin.name, "pool": device.pool, "device": device.name });
        if is_admin {
            result["adminAccess"] = true.into();
        }
        let mut claim = Allocated::new(NAMESPACE, &name)
            .node(NODE)
            .result(result)
            .reserved_for(pod, pod_uid);
        if let Some(parameters) = &self.options.parameters {
            claim = claim.config("FromClaim", &[REQUEST], &plugin.name, parameters.clone());
        }
        let uid = self.api.allocate_claim(claim);
        self.log.add(format!(
            "claim {name} ({uid}): {}/{}",
            device.pool, device.name
        ));
        let claim = ClaimRef::new(NAMESPACE, &name, &uid);
        self.made.push(claim.clone());
        claim
    }

    /// Deletes the object of a claim.
    pub(crate) fn delete_claim(&self, claim: &ClaimRef) {
        self.api.deallocate_claim(&claim.namespace, &claim.name);
        self.api
            .delete("resourceclaims", &claim.namespace, &claim.name);
    }

    /// The daemon that runs the driver.
    pub(crate) async fn daemon(&self) -> Result<Daemon> {
        let sockets = self.program()?.daemon.as_ref();
        let sockets = sockets.context("no daemon runs the driver")?;
        Daemon::connect(self.directories.root(), sockets).await
    }

    /// Why the daemon will not have the driver serve, as far as it has said so.
    async fn refusal(&mut self) -> Option<String> {
        let Target::Program(Program {
            daemon: Some(sockets),
            ..
        }) = &self.options.target
        else {
            return None;
        };
        if self.asked.is_some_and(|asked| asked.elapsed() < ASK) {
            return None;
        }
        self.asked = Some(Instant::now());
        Daemon::refusal(self.directories.root(), sockets).await
    }

    /// Unprepares the claims of a case with a driver that lives on, as far as time allows, and forgets what was exchanged.
    pub(crate) async fn release(&mut self) {
        let claims = std::mem::take(&mut self.made);
        let release = async {
            let Ok(plugin) = self.look_for(None).await else {
                return;
            };
            for claim in claims {
                // Another case is about a refusal.
                let _ = plugin.client.unprepare(&claim).await;
            }
        };
        let _ = tokio::time::timeout(RELEASE, release).await;
        self.log.take();
    }

    /// Returns the messages exchanged since the last call, and the end of the driver's output.
    pub(crate) fn messages(&self) -> Vec<String> {
        let mut lines = self.log.take();
        let requests = self.api.requests();
        let from = requests.len().saturating_sub(REQUESTS_SHOWN);
        let seen = requests[from..].iter();
        lines.extend(
            seen.map(|seen| format!("API server: {} {} -> {}", seen.verb, seen.path, seen.code)),
        );
        let output = each_once(&self.output.text());
        let from = output.len().saturating_sub(LINES_SHOWN);
        lines.extend(output[from..].iter().map(|line| format!("driver: {line}")));
        lines
    }
}

impl Drop for TestNode {
    fn drop(&mut self) {
        // It would be left otherwise. The driver may have removed it.
        if self.is_read_only {
            let _ = self.make_writable();
        }
    }
}

/// The lines of a text, each once, with how often it is there. Times at their beginning do not count.
fn each_once(text: &str) -> Vec<String> {
    let is_time = |word: &str| {
        word.ends_with('Z') && word.contains('T') && word.starts_with(|c: char| c.is_ascii_digit())
    };
    let without_time = |line: &str| match line.split_once(' ') {
        Some((time, rest)) if is_time(time) => rest.to_owned(),
        _ => line.to_owned(),
    };
    let (mut shown, mut counts) = (Vec::new(), BTreeMap::<String, usize>::new());
    for line in text.lines() {
        let count = counts.entry(without_time(line)).or_default();
        *count += 1;
        if *count == 1 {
            shown.push(line);
        }
    }
    let counted = shown
        .into_iter()
        .map(|line| match counts[&without_time(line)] {
            1 => line.to_owned(),
            count => format!("{line} ({count} times)"),
        });
    counted.collect()
}

/// The ID of a boot, of which no digit that an ID may choose is that of the boot before.
fn boot_id(boot: usize) -> String {
    /// More than any of the digits of two boots may agree.
    const STEP: usize = 7;
    let digit = |place: usize| match place {
        // The version, and the variant.
        12 => 4,
        16 => 8 + (place + boot) % 4,
        _ => (3 * place + STEP * boot) % 16,
    };
    let mut id = String::new();
    for place in 0..32 {
        if [8, 12, 16, 20].contains(&place) {
            id.push('-');
        }
        id.push_str(&format!("{:x}", digit(place)));
    }
    id
}

/// A client of a registration socket, which names it as a kubelet does.
async fn registration(socket: &Path) -> Result<RegistrationClient<Channel>> {
    let stream = authority::dial(socket, AT_ONCE)
        .await
        .map_err(|why| anyhow!("{why}"))?;
    let channel = authority::channel(stream, authority::of_path(socket)).await;
    Ok(RegistrationClient::new(
        channel.map_err(|why| anyhow!("{why}"))?.0,
    ))
}

async fn get_info(client: &mut RegistrationClient<Channel>) -> Result<PluginInfo> {
    let info = tokio::time::timeout(GET_INFO, client.get_info(InfoRequest {})).await;
    Ok(info
        .context("GetInfo is not answered within 1 s")?
        .context("GetInfo")?
        .into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_lines_are_shown_once() {
        let text = "2026-11-27T10:00:00.1Z WARN a\nb\n2026-11-27T10:00:01.1Z WARN a\nb c\n";
        let expected = ["2026-11-27T10:00:00.1Z WARN a (2 times)", "b", "b c"];
        assert_eq!(each_once(text), expected);
    }

    #[test]
    fn boot_ids_differ_in_every_part() {
        let ids: Vec<String> = (0..8).map(boot_id).collect();
        assert_eq!(ids[0].len(), 36);
        for pair in ids.windows(2) {
            let differ = pair[0].chars().zip(pair[1].chars()).enumerate();
            for (place, (before, after)) in differ {
                let is_fixed = before == '-' || place == 14;
                assert_eq!(before == after, is_fixed, "{place} of {pair:?}");
            }
        }
    }
}
