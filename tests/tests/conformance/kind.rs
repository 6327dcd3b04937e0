//! Operations of a test on a driver of either kind, and the implementation for each kind.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::FutureExt;
use native_null::{Claim, Device, Event, Operation, Options, Plugin, ScriptedOutcome};
use nodedock_tests::drivers::{Form, side_file, wasm};
use nodedock_tests::versions::{FILE, logged_calls};
use nodedock_tests::{DEADLINE, Daemon, Root};
use scripted::{Command, POOL, STRANGER_UID, Script};
use serde_json::json;
use tokio::sync::Notify;
use tokio::time::timeout;
use tonic::Code;

/// A kind of driver, and one that follows scripts on a root.
pub(crate) trait Kind: Sized {
    /// The driver's name.
    const DRIVER: &'static str;
    /// True if the daemon writes the CDI files; else the driver does.
    const EDITS: bool;

    /// A driver that is not there yet.
    fn new(root: &Root) -> Self;

    /// It comes, or comes back after it left, and serves when this returns.
    async fn come(&mut self, daemon: &Daemon);

    /// Stops the driver in an orderly way. It is gone when this returns; calls in flight are not cancelled.
    async fn leave(&mut self, daemon: &Daemon);

    /// It runs again after it died.
    async fn revive(&mut self, daemon: &Daemon);

    /// Replaces the script. A driver that serves follows it when this returns.
    async fn run_script(&mut self, daemon: &Daemon, script: Script);

    /// Returns the driver's calls so far, such as `prepare ok,skip`.
    fn calls(&mut self, root: &Root) -> Vec<String>;

    /// Waits until it is asked this for the `times`th time.
    async fn until_asked(&mut self, root: &Root, call: &str, times: usize);
}

fn count(calls: &[String], wanted: &str) -> usize {
    calls.iter().filter(|call| *call == wanted).count()
}

/// The driver `scripted`, as a file.
pub(crate) struct Wasm {
    generation: u32,
}

impl Kind for Wasm {
    const DRIVER: &'static str = scripted::NAME;
    const EDITS: bool = true;

    fn new(root: &Root) -> Self {
        root.drop_in("scripted.grant.yaml", side_file("scripted", "grant"));
        Self { generation: 0 }
    }

    async fn come(&mut self, daemon: &Daemon) {
        daemon.drop_in(FILE, wasm("scripted", Form::Core));
        daemon.until_serving(Self::DRIVER).await;
    }

    async fn leave(&mut self, daemon: &Daemon) {
        daemon.take_out(FILE);
        daemon.until_gone(Self::DRIVER).await;
    }

    /// Every call has an instance of its own.
    async fn revive(&mut self, _: &Daemon) {}

    async fn run_script(&mut self, daemon: &Daemon, script: Script) {
        self.generation += 1;
        let script = Script {
            generation: self.generation,
            ..script
        };
        daemon.drop_in_script(&script);
        daemon
            .until_device(POOL, &format!("generation-{}", self.generation), true)
            .await;
    }

    fn calls(&mut self, root: &Root) -> Vec<String> {
        logged_calls(&root.log()).collect()
    }

    async fn until_asked(&mut self, root: &Root, call: &str, times: usize) {
        let what = format!("{} is asked to {call}", Self::DRIVER);
        let asked = || {
            let calls: Vec<_> = logged_calls(&root.log()).collect();
            if count(&calls, call) >= times {
                Ok(())
            } else {
                Err(format!("{calls:?}"))
            }
        };
        nodedock_tests::wait::until_path(&root.log_path(), &what, asked).await;
    }
}

/// The plugin `native-null`, in the test's own process.
pub(crate) struct Native {
    options: Options,
    /// Directory for its CDI specs.
    cdi: PathBuf,
    plugin: Option<Plugin>,
    script: Script,
    release: Arc<Release>,
    calls: Vec<String>,
}

/// Devices in an answer that is too large for the host.
const HUGE_DEVICES: usize = 300;

/// Ends holds, those that come later as well.
#[derive(Default)]
struct Release {
    released: AtomicBool,
    notify: Arc<Notify>,
}

impl Native {
    fn script(&self) -> native_null::Script {
        let (script, release, cdi) = (self.script.clone(), self.release.clone(), self.cdi.clone());
        native_null::Script::new(move |operation, claim| {
            let command = match operation {
                Operation::Prepare => {
                    write_spec(&cdi, claim);
                    script.for_prepare(&claim.name)
                }
                Operation::Unprepare => script.for_unprepare(&claim.name),
            };
            answer(command, claim, &release)
        })
    }

    async fn event(&self) -> Event {
        let plugin = self.plugin.as_ref().expect("it is there");
        let event = timeout(DEADLINE, plugin.event()).await;
        event.unwrap_or_else(|_| panic!("nothing more happens to it after {:?}", self.calls))
    }

    async fn registered(&mut self) {
        loop {
            match self.event().await {
                Event::Notified(true, _) => return,
                event => self.note(event),
            }
        }
    }

    fn note(&mut self, event: Event) {
        let Event::Called {
            operation, claims, ..
        } = event
        else {
            return;
        };
        let names: Vec<_> = claims.iter().map(|claim| claim.name.as_str()).collect();
        self.calls
            .push(format!("{operation:?} {}", names.join(",")).to_lowercase());
    }
}

/// Writes the CDI spec of a claim, as a plugin does before it answers: atomically, like the Go helper.
fn write_spec(dir: &Path, claim: &Claim) {
    let device = json!({"name": claim.uid, "containerEdits": {"env": ["SCRIPT=native"]}});
    let kind = format!("{}/script", Native::DRIVER);
    let spec = json!({"cdiVersion": "0.5.0", "kind": kind, "devices": [device]});
    let temporary = dir.join(format!(".{}", claim.uid));
    std::fs::write(&temporary, spec.to_string()).expect("write into the CDI directory");
    std::fs::rename(temporary, dir.join(format!("{}.json", claim.uid)))
        .expect("rename in the CDI directory");
}

fn answer(command: Command, claim: &Claim, release: &Release) -> ScriptedOutcome {
    let device = Device {
        requests: vec!["device-0".to_owned()],
        pool: POOL.to_owned(),
        device: claim.name.clone(),
        cdi_names: vec![format!("{}/script={}", Native::DRIVER, claim.uid)],
        share_id: None,
    };
    let other = Device {
        device: format!("{}-else", claim.name),
        ..device.clone()
    };
    let well = ScriptedOutcome::Devices(vec![device.clone()]);
    match command {
        Command::Ok => well,
        Command::RefusePermanent => {
            ScriptedOutcome::Status(Code::InvalidArgument, "the script refuses it".to_owned())
        }
        // A plugin has no way to say a time.
        Command::RefuseTransient | Command::RefuseAnHour => {
            ScriptedOutcome::Error("the script waits".to_owned())
        }
        // Without this, the plugin would run for ever.
        Command::Die | Command::Spin | Command::Grow | Command::Flood => ScriptedOutcome::Die,
        Command::Hold if release.released.load(Ordering::SeqCst) => well,
        Command::Hold => ScriptedOutcome::After(release.notify.clone(), Box::new(well)),
        Command::Release => {
            release.released.store(true, Ordering::SeqCst);
            // Kept for a hold that begins just now.
            release.notify.notify_one();
            well
        }
        Command::Skip => ScriptedOutcome::Skip,
        Command::Twice => ScriptedOutcome::Twice(vec![device]),
        Command::Stranger => ScriptedOutcome::Stranger(STRANGER_UID.to_owned(), vec![device]),
        Command::WrongClaim => ScriptedOutcome::Instead(STRANGER_UID.to_owned(), vec![device]),
        Command::Huge => ScriptedOutcome::Devices(vec![device; HUGE_DEVICES]),
        Command::OtherDevice => ScriptedOutcome::Devices(vec![other]),
    }
}

impl Kind for Native {
    const DRIVER: &'static str = "scripted-native.nodedock.dev";
    const EDITS: bool = false;

    fn new(root: &Root) -> Self {
        let options = Options::new(
            Self::DRIVER,
            &root.state().join("plugins_registry"),
            &root.path().join("plugins"),
        );
        let (cdi, script) = (root.cdi(), Script::default());
        Self {
            options,
            cdi,
            plugin: None,
            script,
            release: Arc::default(),
            calls: Vec::new(),
        }
    }

    async fn come(&mut self, daemon: &Daemon) {
        let (options, script) = (self.options.clone(), self.script());
        let start = || Plugin::unregistered(options, script).expect("make the driver's socket");
        let plugin = self.plugin.get_or_insert_with(start);
        plugin.register().expect("make the registration socket");
        self.registered().await;
        daemon.until_serving(Self::DRIVER).await;
    }

    async fn leave(&mut self, daemon: &Daemon) {
        let plugin = self.plugin.as_ref().expect("it is there");
        plugin.unregister().expect("remove the registration socket");
        daemon.until_gone(Self::DRIVER).await;
    }

    /// Restarts the plugin as another process on the same sockets.
    async fn revive(&mut self, daemon: &Daemon) {
        self.calls(daemon);
        self.plugin = None;
        self.come(daemon).await;
    }

    async fn run_script(&mut self, _: &Daemon, script: Script) {
        self.script = script;
        if let Some(plugin) = &self.plugin {
            plugin.set_script(self.script());
        }
    }

    fn calls(&mut self, _: &Root) -> Vec<String> {
        while let Some(event) = self
            .plugin
            .as_ref()
            .and_then(|plugin| plugin.event().now_or_never())
        {
            self.note(event);
        }
        self.calls.clone()
    }

    async fn until_asked(&mut self, root: &Root, call: &str, times: usize) {
        while count(&self.calls(root), call) < times {
            let event = self.event().await;
            self.note(event);
        }
    }
}
