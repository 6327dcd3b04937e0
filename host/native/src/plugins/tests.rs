//! Tests with scripted plugins in a watched directory, from the socket to the registry.

mod many;

use std::path::Path;
use std::time::Duration;

use native_null::{Event, Options, Plugin, Script};
use tokio::sync::broadcast;

use super::*;
use crate::endpoints::tests::Bench;
use crate::grpc::Connection;
use nodedock_base::changes::Changes;
use nodedock_core::driver::{Call, Driver, DriverIdentity, Link};
use nodedock_core::registry::{DriverState, DriverView};
use nodedock_model::{Changed, DriverClaim, DriverName, ObjectRef, Problem};

const DRIVER: &str = "null.example.com";
/// Longer than any step takes, and shorter than a person waits.
const PATIENCE: Duration = Duration::from_secs(60);
/// Time for the answer of a plugin that gives none.
const SHORT: Duration = Duration::from_millis(200);

struct Dock {
    bench: Bench,
    registry: Registry,
    changes: broadcast::Receiver<Changed>,
}

impl Dock {
    fn new() -> Self {
        Self::retrying(Duration::from_millis(20))
    }

    /// A plugin has as long for its answer as a test waits.
    fn retrying(retry: Duration) -> Self {
        Self::with(retry, PATIENCE)
    }

    /// Waits so long before a retry, and for GetInfo.
    fn with(retry: Duration, info: Duration) -> Self {
        let (bench, changes) = (Bench::new(), Changes::default());
        let listener = changes.listen();
        let times = PluginTimes {
            info,
            retry_min: retry,
            retry_max: retry,
            ..PluginTimes::default()
        };
        let registry = bench.watch(times, changes);
        Self {
            bench,
            registry,
            changes: listener,
        }
    }

    fn options(&self, driver: &str) -> Options {
        Options::new(
            driver,
            &self.bench.dir.path().join("reg"),
            &self.bench.dir.path().join("plugins"),
        )
    }

    async fn start(&self, options: Options) -> Plugin {
        let name = options.registration_name.clone();
        Plugin::start(options, Script::ok("v"))
            .await
            .unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    fn view(&self, source: &Path) -> Option<DriverView> {
        self.registry
            .list()
            .into_iter()
            .find(|view| Path::new(&view.source) == source)
    }

    /// Waits until the registry satisfies a condition.
    async fn until(&mut self, what: &str, wanted: impl Fn(&Self) -> bool) {
        let arrived = async {
            while !wanted(self) {
                // A lag is harmless: the test checks the registry, not the change.
                let _ = self.changes.recv().await;
            }
        };
        if tokio::time::timeout(PATIENCE, arrived).await.is_err() {
            panic!("{what}: {:#?}", self.registry.list());
        }
    }

    async fn state(&mut self, source: &Path, state: DriverState) {
        let source = source.to_owned();
        let is = move |dock: &Self| dock.view(&source).is_some_and(|view| view.state == state);
        self.until(state.as_str(), is).await;
    }

    async fn gone(&mut self, source: &Path) {
        let source = source.to_owned();
        self.until("gone", move |dock| dock.view(&source).is_none())
            .await;
    }

    /// Returns the serving source of a name.
    fn served_by(&self, driver: &str) -> Result<String, Problem> {
        self.registry
            .serving(&DriverName::new(driver).unwrap())
            .map(|driver| driver.identity.source.clone())
    }

    /// Checks the refusal that the plugin is notified of and that the state shows.
    async fn refusal(&mut self, options: Options) -> String {
        let plugin = self.start(options).await;
        let (registered, message) = plugin.notified().await;
        assert!(!registered);
        let socket = plugin.registration_socket();
        self.state(&socket, DriverState::Failed).await;
        let shown = self.view(&socket).unwrap().reason;
        assert!(
            message.starts_with(&shown),
            "message {message:?}, shown {shown:?}"
        );
        message
    }
}

fn claim() -> DriverClaim {
    let id = ObjectRef::new("default", "c", "uid-1").unwrap();
    DriverClaim {
        id,
        devices: Vec::new(),
        configs: Vec::new(),
        annotations: Default::default(),
        reserved_for: Vec::new(),
        progress: Vec::new(),
    }
}

async fn prepare(driver: &Driver) -> bool {
    let call = Call {
        request_id: "r".into(),
        deadline: PATIENCE,
    };
    driver
        .claims
        .as_ref()
        .unwrap()
        .prepare(&call, &[claim()])
        .await["uid-1"]
        .is_ok()
}

#[tokio::test]
async fn plugin_is_queried_notified_then_serves() {
    let mut dock = Dock::new();
    let plugin = dock.start(dock.options(DRIVER)).await;
    assert_eq!(plugin.event().await, Event::Asked);
    assert_eq!(plugin.event().await, Event::Notified(true, String::new()));
    let socket = plugin.registration_socket();
    dock.state(&socket, DriverState::Serving).await;
    let view = dock.view(&socket).unwrap();
    assert_eq!(
        (
            view.name.unwrap().as_str(),
            view.version.as_str(),
            view.reason.as_str()
        ),
        (DRIVER, "v1", "")
    );
    let native = view.native.unwrap();
    assert_eq!((native.connection, native.services.len()), ("connected", 2));
    assert!(
        prepare(
            &dock
                .registry
                .serving(&DriverName::new(DRIVER).unwrap())
                .unwrap()
        )
        .await
    );
}

#[tokio::test]
async fn endpoint_may_be_the_registration_socket() {
    let mut dock = Dock::new();
    let mut options = dock.options(DRIVER);
    options.registration_name = "below/it/reg.sock".into();
    options.versions.v1 = false;
    let plugin = dock.start(options).await;
    let socket = plugin.registration_socket();
    dock.state(&socket, DriverState::Serving).await;
    assert_eq!(dock.view(&socket).unwrap().version, "v1beta1");
    // Without an endpoint the registration socket is used; it does not serve the driver, and a call fails with that.
    let mut options = dock.options("other.example.com");
    options.said_endpoint = Some(String::new());
    let plugin = dock.start(options).await;
    let socket = plugin.registration_socket();
    dock.state(&socket, DriverState::Serving).await;
    assert_eq!(
        dock.view(&socket).unwrap().native.unwrap().endpoint,
        socket.display().to_string()
    );
}

#[tokio::test]
async fn refusals_use_the_kubelets_texts() {
    let mut dock = Dock::retrying(PATIENCE);
    let with = |name: &str, change: fn(&mut Options)| {
        let mut options = dock.options(name);
        change(&mut options);
        options
    };
    let cases = [
        (
            with("a.example.com", |o| o.plugin_type = "CSIPlugin".into()),
            "no handler registered for plugin type: CSIPlugin",
        ),
        (
            with("f.example.com", |o| {
                o.said_endpoint = Some("/dev/null".into())
            }),
            "not a socket",
        ),
        (
            with("g.example.com", |o| {
                o.said_endpoint = Some("/no/such.sock".into())
            }),
            "No such file",
        ),
        (with("Bad_Name", |_| ()), "driver name"),
    ];
    for (options, wanted) in cases {
        let message = dock.refusal(options).await;
        assert!(message.contains(wanted), "{message}");
    }
    assert!(dock.registry.instances.all().is_empty());
}

/// A plugin named `nodedock.sock` as its endpoint and served.
#[tokio::test]
async fn daemon_socket_as_endpoint_is_refused() {
    let mut dock = Dock::retrying(PATIENCE);
    let own = dock.bench.dir.path().join("nodedock.sock");
    let _listener = nodedock_base::socket::bind(&own).await.unwrap();
    let (link, name) = (
        own.with_file_name("link.sock"),
        own.with_file_name("name.sock"),
    );
    std::os::unix::fs::symlink(&own, &link).unwrap();
    std::fs::hard_link(&own, &name).unwrap();
    for (kind, domain, endpoint) in [
        ("DRAPlugin", "a.example.com", &own),
        ("DRAPlugin", "b.example.com", &link),
        ("DRAPlugin", "c.example.com", &name),
        ("DevicePlugin", "d.example.com", &own),
    ] {
        let mut options = dock.options(domain);
        options.said_endpoint = Some(endpoint.display().to_string());
        if kind == "DevicePlugin" {
            options.driver = format!("{domain}/gpu");
            options.said_services = Some(vec!["v1beta1".to_owned()]);
        }
        options.plugin_type = kind.to_owned();
        let message = dock.refusal(options).await;
        assert!(
            message.contains("it is a socket of this daemon"),
            "{kind}: {message}"
        );
    }
    assert!(dock.registry.instances.all().is_empty());
}

/// The endpoint is a socket of the plugin when it registers, and a link to one of the daemon when the daemon connects.
#[tokio::test]
async fn plugin_connection_never_reaches_daemon() {
    let dir = tempfile::tempdir().unwrap();
    let (own, endpoint) = (
        dir.path().join("nodedock.sock"),
        dir.path().join("dra.sock"),
    );
    let listener = nodedock_base::socket::bind(&own).await.unwrap();
    std::os::unix::fs::symlink(&own, &endpoint).unwrap();
    let tasks = Tasks::new();
    let mut connection = Connection::open(endpoint, &tasks);
    connection.changed().await;
    let Link::Lost(why) = connection.link() else {
        panic!("{:?}", connection.link())
    };
    assert!(why.contains("is a socket of this daemon"), "{why}");
    assert!(
        futures::FutureExt::now_or_never(listener.accept()).is_none(),
        "nothing connected"
    );
    tasks.stop();
}

#[tokio::test]
async fn failed_notification_is_retried() {
    let mut dock = Dock::new();
    let options = dock.options(DRIVER);
    let plugin = Plugin::unregistered(options, Script::ok("v")).unwrap();
    plugin.fail_notifications(Some("not today"));
    plugin.register().unwrap();
    assert!(plugin.notified().await.0);
    let socket = plugin.registration_socket();
    dock.state(&socket, DriverState::Failed).await;
    assert!(dock.view(&socket).unwrap().reason.contains("not today"));
    assert!(dock.served_by(DRIVER).is_err());
    assert!(plugin.notified().await.0, "tried again");
    plugin.fail_notifications(None);
    dock.state(&socket, DriverState::Serving).await;
}

#[tokio::test]
async fn socket_without_listener_is_retried() {
    let mut dock = Dock::new();
    let options = dock.options(DRIVER);
    let socket = options.registration_socket();
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    dock.state(&socket, DriverState::Failed).await;
    assert!(dock.view(&socket).unwrap().reason.contains("connect to"));
    assert!(socket.exists());
    let _plugin = dock.start(options).await;
    dock.state(&socket, DriverState::Serving).await;
}

#[tokio::test]
async fn silent_plugin_delays_no_other() {
    let mut dock = Dock::with(Duration::from_millis(20), SHORT);
    let mute = dock.bench.dir.path().join("reg/mute.sock");
    let _listener = std::os::unix::net::UnixListener::bind(&mute).unwrap();
    let plugin = dock.start(dock.options(DRIVER)).await;
    dock.state(&plugin.registration_socket(), DriverState::Serving)
        .await;
    dock.state(&mute, DriverState::Failed).await;
    let reason = dock.view(&mute).unwrap().reason;
    assert!(reason.contains("GetInfo"), "{reason}");
}

#[tokio::test]
async fn replaced_socket_registers_again() {
    let mut dock = Dock::new();
    let plugin = dock.start(dock.options(DRIVER)).await;
    assert!(plugin.notified().await.0);
    plugin.register().unwrap();
    assert!(plugin.notified().await.0);
    let socket = plugin.registration_socket();
    dock.state(&socket, DriverState::Serving).await;
    plugin.unregister().unwrap();
    dock.gone(&socket).await;
    assert_eq!(dock.served_by(DRIVER).unwrap_err().code, "driver-unknown");
}

#[tokio::test]
async fn renamed_socket_is_the_same_plugin() {
    let mut dock = Dock::new();
    let plugin = dock.start(dock.options(DRIVER)).await;
    let (old, new) = (
        plugin.registration_socket(),
        dock.bench.dir.path().join("reg/new.sock"),
    );
    dock.state(&old, DriverState::Serving).await;
    std::fs::rename(&old, &new).unwrap();
    dock.gone(&old).await;
    dock.state(&new, DriverState::Serving).await;
}

#[tokio::test]
async fn older_instance_takes_over_from_newest() {
    let mut dock = Dock::new();
    let old = dock.start(dock.options(DRIVER).instance("old")).await;
    dock.state(&old.registration_socket(), DriverState::Serving)
        .await;
    let new = dock.start(dock.options(DRIVER).instance("new")).await;
    dock.state(&new.registration_socket(), DriverState::Serving)
        .await;
    dock.state(&old.registration_socket(), DriverState::Draining)
        .await;
    assert_eq!(
        dock.served_by(DRIVER).unwrap(),
        new.registration_socket().display().to_string()
    );
    // The other instance unprepares a claim of the first: drivers are called by name.
    new.disconnect();
    dock.state(&new.registration_socket(), DriverState::Lost)
        .await;
    dock.state(&old.registration_socket(), DriverState::Serving)
        .await;
    assert_eq!(
        dock.served_by(DRIVER).unwrap(),
        old.registration_socket().display().to_string()
    );
    new.serve().unwrap();
    dock.state(&new.registration_socket(), DriverState::Serving)
        .await;
    new.unregister().unwrap();
    dock.gone(&new.registration_socket()).await;
    dock.state(&old.registration_socket(), DriverState::Serving)
        .await;
}

#[tokio::test]
async fn lost_connection_keeps_registration() {
    let mut dock = Dock::new();
    let plugin = dock.start(dock.options(DRIVER)).await;
    let socket = plugin.registration_socket();
    dock.state(&socket, DriverState::Serving).await;
    plugin.disconnect();
    dock.state(&socket, DriverState::Lost).await;
    assert!(
        dock.served_by(DRIVER).is_ok(),
        "a call waits a short time for the plugin"
    );
    plugin.serve().unwrap();
    dock.state(&socket, DriverState::Serving).await;
    assert!(
        prepare(
            &dock
                .registry
                .serving(&DriverName::new(DRIVER).unwrap())
                .unwrap()
        )
        .await
    );
}

#[tokio::test]
async fn endpoint_serves_one_registration() {
    let mut dock = Dock::retrying(PATIENCE);
    let first = dock.start(dock.options(DRIVER)).await;
    dock.state(&first.registration_socket(), DriverState::Serving)
        .await;
    let link = dock.bench.dir.path().join("link.sock");
    std::os::unix::fs::symlink(first.endpoint(), &link).unwrap();
    let mut thief = dock.options("thief.example.com");
    thief.said_endpoint = Some(link.display().to_string());
    let message = dock.refusal(thief).await;
    assert!(
        message.contains("plugin registration failed with err: endpoint")
            && message.contains(DRIVER),
        "{message}"
    );
    let mut second = dock.options(DRIVER);
    second.registration_name = "second.sock".into();
    second.endpoint = dock.bench.dir.path().join("unused.sock");
    second.said_endpoint = Some(first.endpoint().display().to_string());
    let second = dock.start(second).await;
    assert!(!second.notified().await.0);
    // Long before its retry: the name that it waits for is free.
    first.unregister().unwrap();
    dock.state(&second.registration_socket(), DriverState::Serving)
        .await;
}

#[tokio::test]
async fn taken_driver_name_is_refused() {
    let mut dock = Dock::retrying(PATIENCE);
    let identity = DriverIdentity {
        name: DriverName::new(DRIVER).unwrap(),
        kind: DriverKind::Wasm,
        version: "1.0.0".into(),
        digest: String::new(),
        source: "null.wasm".into(),
        summary: String::new(),
    };
    let wasm = Driver {
        identity: identity.into(),
        claims: None,
        inventory: None,
    };
    dock.registry.serve("null.wasm", wasm.clone()).unwrap();
    let plugin = dock.start(dock.options(DRIVER)).await;
    let (registered, message) = plugin.notified().await;
    assert!(
        !registered && message.contains("taken by null.wasm"),
        "{message}"
    );
    dock.state(&plugin.registration_socket(), DriverState::Failed)
        .await;
    dock.registry.retire("null.wasm");
    dock.state(&plugin.registration_socket(), DriverState::Serving)
        .await;
    let other = dock.registry.serve("null.wasm", wasm).unwrap_err();
    assert_eq!(other, plugin.registration_socket().display().to_string());
}

#[tokio::test]
async fn device_plugin_goes_to_device_manager() {
    let mut dock = Dock::new();
    let mut options = dock.options("gpu");
    options.plugin_type = "DevicePlugin".into();
    options.driver = "example.com/gpu".into();
    options.said_services = Some(vec!["v1beta1".into()]);
    let plugin = dock.start(options).await;
    assert_eq!(plugin.notified().await, (true, String::new()));
    let socket = plugin.registration_socket();
    dock.state(&socket, DriverState::Described).await;
    assert!(
        dock.view(&socket)
            .unwrap()
            .reason
            .contains("the device manager connects")
    );
    plugin.unregister().unwrap();
    dock.gone(&socket).await;
}

#[tokio::test]
async fn an_operator_registers_a_plugin_again() {
    let mut dock = Dock::retrying(PATIENCE);
    let plugin = Plugin::unregistered(dock.options(DRIVER), Script::ok("v")).unwrap();
    plugin.fail_notifications(Some("not yet"));
    plugin.register().unwrap();
    let socket = plugin.registration_socket();
    dock.state(&socket, DriverState::Failed).await;
    plugin.fail_notifications(None);
    dock.registry
        .reload(&socket.display().to_string())
        .await
        .unwrap();
    dock.state(&socket, DriverState::Serving).await;
}
