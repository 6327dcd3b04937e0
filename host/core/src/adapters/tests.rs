mod changes;
mod starts;

use std::path::Path;

use proptest::prelude::*;

use super::publication::source_of;
use super::*;
use crate::checkpoint::{self, Checkpoint};
use crate::driver::{Call, Driver};
use crate::manager::tests::scene::FakePlugin;
use nodedock_base::changes::Changes;
use nodedock_model::{
    AllocatedDevice, AllocationMount, AllocationNode, ContainerAllocation, DeviceAccess,
    DeviceName, DriverClaim, HealthState, ObjectRef, PreparedClaim,
};

const RESOURCE: &str = "example.com/thing";
const DRIVER: &str = "thing.example.com";

/// A machine with a checkpoint, and `/dev/thing`.
struct Home {
    directory: tempfile::TempDir,
    checkpoint: Checkpoint,
    /// Adapters of the last start.
    adapters: Mutex<Option<Adapters>>,
}

/// Adapters as a daemon has them.
struct Run {
    adapters: Adapters,
    registry: Registry,
    conditions: Conditions,
    tasks: Tasks,
}

fn resource() -> ExtendedResource {
    RESOURCE.parse().unwrap()
}

fn entry_with(text: &str) -> AdapterEntry {
    let text = format!("apiVersion: nodedock.dev/v1\nkind: DevicePluginAdapter\n{text}");
    AdapterEntry {
        adapter: Adapter::parse(&text).unwrap(),
        source: "/a.adapter.yaml".to_owned(),
    }
}

fn entry() -> AdapterEntry {
    entry_with(&format!(
        "resource: {RESOURCE}\ndriver: {DRIVER}\npool: things\n"
    ))
}

impl Home {
    fn new() -> Self {
        let home = tempfile::tempdir().unwrap();
        for directory in ["sys", "dev"] {
            std::fs::create_dir(home.path().join(directory)).unwrap();
        }
        std::fs::write(home.path().join("dev/thing"), "character 10:200").unwrap();
        let opened = checkpoint::open(&home.path().join("checkpoint.db")).unwrap();
        Self {
            directory: home,
            checkpoint: opened.checkpoint,
            adapters: Mutex::default(),
        }
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    async fn start(&self, entries: Vec<AdapterEntry>, has_kubelet: bool) -> Run {
        self.start_with(entries, has_kubelet, Taken::new(), &[])
            .await
    }

    async fn start_with(
        &self,
        entries: Vec<AdapterEntry>,
        has_kubelet: bool,
        taken: Taken,
        claimed: &[&str],
    ) -> Run {
        let claimed: Vec<_> = claimed
            .iter()
            .map(|name| (*name, DriverKind::Adapter))
            .collect();
        let entries = AdapterEntries {
            entries,
            is_incomplete: false,
        };
        self.load(entries, has_kubelet, taken, &claimed).await
    }

    async fn load(
        &self,
        entries: AdapterEntries,
        has_kubelet: bool,
        taken: Taken,
        claimed: &[(&str, DriverKind)],
    ) -> Run {
        let conditions = Conditions::new(Changes::default());
        let registry = Registry::new(Changes::default(), conditions.clone(), None);
        let parts = AdapterParts {
            registry: registry.clone(),
            conditions: conditions.clone(),
            sysfs: SysfsRoot::open(&self.path().join("sys")).unwrap(),
            numa_node_form: NumaNodeForm::default(),
            hardware: Hardware::simulated(self.path()),
            grace: Duration::from_secs(300),
            has_kubelet,
        };
        let claimed = claimed
            .iter()
            .map(|(name, kind)| (name.parse().unwrap(), Some(*kind)))
            .collect();
        let last = self.adapters.lock().take();
        let records = match &last {
            Some(last) => last.0.stored.lock().await.records().clone(),
            None => BTreeMap::new(),
        };
        let stored = StoredRecords::new(self.checkpoint.clone(), records);
        let adapters = Adapters::load(parts, entries, stored, taken, &claimed).await;
        *self.adapters.lock() = Some(adapters.clone());
        let tasks = Tasks::new();
        adapters.start(&tasks);
        Run {
            adapters,
            registry,
            conditions,
            tasks,
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.tasks.stop();
    }
}

fn list(ids: &[(&str, bool)]) -> BTreeMap<String, PluginDevice> {
    let device = |(id, healthy): &(&str, bool)| {
        (
            (*id).to_owned(),
            PluginDevice {
                id: (*id).to_owned(),
                healthy: *healthy,
                numa_nodes: vec![1],
            },
        )
    };
    ids.iter().map(device).collect()
}

impl Run {
    /// A plugin that registered and listed.
    fn plug(&self, plugin: &Arc<FakePlugin>, ids: &[(&str, bool)]) -> u64 {
        let generation = self.adapters.arrived(&resource(), plugin.clone()).unwrap();
        self.adapters.listed(&resource(), generation, list(ids));
        generation
    }

    /// Reads the adapters again.
    async fn apply(&self, entries: Vec<AdapterEntry>) -> BTreeSet<String> {
        let entries = AdapterEntries {
            entries,
            is_incomplete: false,
        };
        let claimed = Claimed::new();
        let applied = self.adapters.apply(entries, &claimed, &self.tasks);
        applied.await.unwrap()
    }

    fn driver(&self) -> Driver {
        self.registry.serving(&DRIVER.parse().unwrap()).unwrap()
    }

    /// Names of the devices that are published, each with its health; `None`: nothing is.
    fn published(&self) -> Option<Vec<(String, HealthState)>> {
        let published = self.driver().inventory?.borrow().clone();
        let (name, pool) = published.inventory.pools.first_key_value()?;
        assert_eq!(
            (name.as_str(), pool.extended_resource.as_ref()),
            ("things", Some(&resource()))
        );
        let health = |device: &DeviceName| published.health[&(name.clone(), device.clone())].state;
        Some(
            pool.devices
                .keys()
                .map(|device| (device.to_string(), health(device)))
                .collect(),
        )
    }

    async fn until_published(&self, wanted: &[(&str, HealthState)]) {
        let wanted: Vec<_> = wanted
            .iter()
            .map(|(name, health)| ((*name).to_owned(), *health))
            .collect();
        let what = tokio::time::timeout(Duration::from_secs(5), async {
            while self.published().as_ref() != Some(&wanted) {
                tokio::task::yield_now().await;
            }
        });
        assert!(what.await.is_ok(), "{:?}, not {wanted:?}", self.published());
    }

    async fn prepare(&self, claim: DriverClaim) -> Result<PreparedClaim, Problem> {
        let call = Call {
            request_id: "r".into(),
            deadline: Duration::from_secs(2),
        };
        let driver = self.driver().claims.unwrap();
        let mut outcomes = driver.prepare(&call, std::slice::from_ref(&claim)).await;
        outcomes.remove(&claim.id.uid).unwrap()
    }

    fn codes(&self) -> Vec<String> {
        self.conditions
            .list()
            .into_iter()
            .map(|condition| condition.problem.code)
            .collect()
    }
}

/// A claim with devices by request.
fn claim(devices: &[(&str, &str)]) -> DriverClaim {
    let device = |(request, device): &(&str, &str)| AllocatedDevice {
        request: (*request).to_owned(),
        driver: DRIVER.parse().unwrap(),
        pool: "things".parse().unwrap(),
        device: device.parse().unwrap(),
        share_id: None,
        consumed: BTreeMap::new(),
        admin_access: false,
        binding: Default::default(),
    };
    DriverClaim {
        id: ObjectRef::new("default", "c", "uid-c").unwrap(),
        devices: devices.iter().map(device).collect(),
        configs: Vec::new(),
        annotations: BTreeMap::new(),
        reserved_for: Vec::new(),
        progress: Vec::new(),
    }
}

/// Returns the devices that a pod of the node API has by the plugin's IDs.
fn taken(ids: &[&str]) -> Taken {
    let ids: BTreeSet<_> = ids.iter().map(|id| (*id).to_owned()).collect();
    [(resource(), ids)].into()
}

const HEALTHY: HealthState = HealthState::Healthy;
const UNHEALTHY: HealthState = HealthState::Unhealthy;

#[tokio::test]
async fn plugin_devices_and_health_are_published() {
    let home = Home::new();
    let run = home.start(vec![entry()], false).await;
    assert!(
        run.driver().inventory.is_none(),
        "claims can be unprepared before the plugin is there"
    );
    let plugin = FakePlugin::new();
    let first = run.plug(&plugin, &[("a", true), ("GPU:1", false)]);
    run.until_published(&[("a", HEALTHY), ("x--47--50--55--3a1", UNHEALTHY)])
        .await;
    run.adapters
        .listed(&resource(), first, list(&[("a", true)]));
    run.until_published(&[("a", HEALTHY)]).await;
    // Of a registration that was replaced nothing counts.
    run.plug(&plugin, &[("b", true)]);
    run.adapters.left(
        &resource(),
        first,
        &Problem::unavailable("gone", "the first one is gone"),
    );
    run.until_published(&[("b", HEALTHY)]).await;
    let view = run.adapters.list().remove(0);
    assert_eq!(
        (view.devices, view.is_connected, view.waits_for.as_str()),
        (1, true, "")
    );
}

/// A rule that was corrected took effect at the next start alone.
#[tokio::test]
async fn changed_rules_apply_to_listed_devices() {
    let home = Home::new();
    let with_rule = |value: &str, names: &str| {
        entry_with(&format!(
            "resource: {RESOURCE}\ndriver: {DRIVER}\n{names}devices:\n- match: .*\n  attributes:\n    model: {{value: {value}}}\n"
        ))
    };
    let things = "pool: things\n";
    let run = home.start(vec![with_rule("one", things)], true).await;
    let model = || {
        let published = run.driver().inventory?.borrow().clone();
        let (_, pool) = published.inventory.pools.first_key_value()?;
        let (_, device) = pool.devices.first_key_value()?;
        let model = device
            .attributes
            .iter()
            .find(|(name, _)| name.to_string().ends_with("model"));
        model.map(|(_, value)| format!("{value:?}"))
    };
    let is_model = |value: &str| model().is_some_and(|model| model.contains(value));
    let until_model = async |value: &str| {
        let changed = tokio::time::timeout(Duration::from_secs(5), async {
            while !is_model(value) {
                tokio::task::yield_now().await;
            }
        });
        assert!(changed.await.is_ok(), "{:?}, not {value}", model());
    };
    run.plug(&FakePlugin::new(), &[("a", true)]);
    run.adapters
        .set_held(&resource(), &BTreeSet::new())
        .await
        .unwrap();
    until_model("one").await;
    let two = with_rule("two", things);
    assert_eq!(run.apply(vec![two.clone()]).await, BTreeSet::new());
    until_model("two").await;

    // What only a start changes.
    let renamed = run.apply(vec![with_rule("three", "pool: others\n")]).await;
    assert_eq!(renamed, BTreeSet::from([two.source.clone()]));
    let mut disabled = two.clone();
    disabled.adapter.enabled = false;
    assert_eq!(run.apply(vec![disabled]).await, BTreeSet::new());
    assert_eq!(run.adapters.disabled().len(), 1);
    assert!(is_model("two"));
    let records = run.adapters.0.stored.lock().await.records().clone();
    assert!(format!("{:?}", records[&resource()].rules).contains("two"));
}

/// A plugin without devices that died, and one that never listed any, had no condition for ever.
#[tokio::test(start_paused = true)]
async fn adapter_without_list_sets_condition() {
    let home = Home::new();
    let run = home.start(vec![entry()], false).await;
    let message = async |wanted: &str| {
        // The clock is paused.
        tokio::time::sleep(Duration::from_secs(301)).await;
        let messages = run
            .conditions
            .list()
            .into_iter()
            .map(|condition| condition.problem.message);
        let messages: Vec<_> = messages.collect();
        assert!(
            messages.len() == 1 && messages[0].contains(wanted),
            "{messages:?}"
        );
        assert_eq!(run.codes(), ["adapter-without-plugin"]);
    };
    message("no device plugin has registered as example.com/thing").await;
    let silent = run
        .adapters
        .arrived(&resource(), FakePlugin::new())
        .unwrap();
    message("has registered, and has not listed its devices yet").await;
    run.adapters.listed(&resource(), silent, BTreeMap::new());
    run.until_published(&[]).await;
    assert!(run.codes().is_empty());
    run.adapters.left(
        &resource(),
        silent,
        &Problem::unavailable("gone", "its stream ended"),
    );
    message("its stream ended").await;
    // A list of a registration that is gone says nothing.
    run.adapters.listed(&resource(), silent, BTreeMap::new());
    assert_eq!(run.codes(), ["adapter-without-plugin"]);
}

#[tokio::test(start_paused = true)]
async fn devices_of_gone_plugin_expire() {
    let home = Home::new();
    let run = home.start(vec![entry()], false).await;
    let registration = run.plug(&FakePlugin::new(), &[("a", true)]);
    run.until_published(&[("a", HEALTHY)]).await;
    run.adapters.left(
        &resource(),
        registration,
        &Problem::unavailable("gone", "its stream ended"),
    );
    run.until_published(&[("a", UNHEALTHY)]).await;
    assert!(run.adapters.plugin(&resource()).is_none());
    tokio::time::sleep(Duration::from_secs(301)).await;
    run.until_published(&[]).await;
    assert_eq!(run.codes(), ["adapter-without-plugin"]);
    run.plug(&FakePlugin::new(), &[("a", true)]);
    run.until_published(&[("a", HEALTHY)]).await;
    assert!(run.codes().is_empty());
}

#[tokio::test]
async fn each_request_becomes_one_allocate_call() {
    let home = Home::new();
    let run = home.start(vec![entry()], false).await;
    let plugin = FakePlugin::wanting_pre_start();
    run.plug(&plugin, &[("a", true), ("B", true), ("c", true)]);
    run.until_published(&[("a", HEALTHY), ("c", HEALTHY), ("x--42", HEALTHY)])
        .await;
    plugin.answer(ContainerAllocation {
        env: [("THING".to_owned(), "1".to_owned())].into(),
        mounts: vec![AllocationMount {
            host_path: "/dev".to_owned(),
            container_path: "/things".to_owned(),
            read_only: true,
        }],
        device_nodes: vec![AllocationNode {
            host_path: "/dev/thing".to_owned(),
            container_path: "/dev/thing0".to_owned(),
            permissions: "rw".to_owned(),
        }],
        annotations: [("example.com/a".to_owned(), "b".to_owned())].into(),
        cdi_devices: vec!["vendor.com/class=a".to_owned()],
    });
    let prepared = run
        .prepare(claim(&[("one", "a"), ("two/large", "c"), ("one", "x--42")]))
        .await
        .unwrap();
    let calls = plugin.calls();
    assert_eq!(calls.allocate, [vec!["a", "B"], vec!["c"]]);
    assert_eq!(calls.pre_start, calls.allocate);
    let devices: Vec<_> = prepared
        .devices
        .iter()
        .map(|device| (device.requests.join(","), device.device.to_string()))
        .collect();
    let expected = [("one", "a"), ("one", "x--42"), ("two", "c")];
    assert_eq!(
        devices,
        expected.map(|(request, device)| (request.to_owned(), device.to_owned()))
    );
    // The containers of a request get its devices together: the first one has the answer.
    let DeviceAccess::EditsAndCdiDevices(edits, names) = &prepared.devices[0].access else {
        panic!("{prepared:?}")
    };
    assert_eq!(names, &["vendor.com/class=a"]);
    assert_eq!(edits.mounts[0].options, ["rbind", "rprivate", "ro"]);
    assert_eq!(
        (
            edits.device_nodes[0].path.as_str(),
            edits.device_nodes[0].node_path()
        ),
        ("/dev/thing0", "/dev/thing")
    );
    assert_eq!(
        prepared.devices[1].access,
        DeviceAccess::Edits(Default::default())
    );
    assert_eq!(prepared.annotations.len(), 1);
    let status = prepared.devices[0].status.as_ref().unwrap();
    assert!(
        status.conditions[0].message.contains("example.com/a"),
        "{status:?}"
    );

    plugin.answer(ContainerAllocation {
        cdi_devices: vec!["v.com/c=a".to_owned()],
        ..Default::default()
    });
    let prepared = run.prepare(claim(&[("one", "a")])).await.unwrap();
    assert_eq!(
        prepared.devices[0].access,
        DeviceAccess::CdiDevices(vec!["v.com/c=a".to_owned()])
    );
    let driver = run.driver().claims.unwrap();
    let call = Call {
        request_id: "r".into(),
        deadline: Duration::from_secs(1),
    };
    assert!(driver.unprepare(&call, &[]).await.is_empty() && !driver.is_pure());
}

#[tokio::test]
async fn refusals_name_driver_and_resource() {
    let home = Home::new();
    let text =
        format!("resource: {RESOURCE}\ndriver: {DRIVER}\npool: things\npaths: [/dev/thing]\n");
    let run = home.start(vec![entry_with(&text)], false).await;
    let refusal = async |claim: DriverClaim| {
        let problem = run.prepare(claim).await.unwrap_err();
        (problem.code.clone(), problem.message)
    };
    let (code, message) = refusal(claim(&[("r", "a")])).await;
    assert_eq!(code, "driver-not-serving", "{message}");
    assert!(
        message.contains("no device plugin has registered"),
        "{message}"
    );

    let plugin = FakePlugin::new();
    let registration = run.plug(&plugin, &[("a", true)]);
    let (code, message) = refusal(claim(&[("r", "b")])).await;
    assert_eq!(code, "device-unknown", "{message}");
    assert!(
        message.contains(DRIVER) && message.contains(RESOURCE),
        "{message}"
    );
    let mut admin = claim(&[("r", "a")]);
    admin.devices[0].admin_access = true;
    assert_eq!(refusal(admin).await.0, "adapter-parameters");
    let mut elsewhere = claim(&[("r", "a")]);
    elsewhere.devices[0].pool = "others".parse().unwrap();
    assert_eq!(refusal(elsewhere).await.0, "device-unknown");
    plugin.refuse(Problem::invalid("not-valid", "no container response"));
    assert_eq!(refusal(claim(&[("r", "a")])).await.0, "not-valid");
    let node = |path: &str| AllocationNode {
        host_path: path.to_owned(),
        container_path: path.to_owned(),
        permissions: "rw".to_owned(),
    };
    for (path, code) in [
        ("/dev/other", "allocation-path-missing"),
        ("/dev", "allocation-path-denied"),
    ] {
        plugin.answer(ContainerAllocation {
            device_nodes: vec![node(path)],
            ..Default::default()
        });
        let (found, message) = refusal(claim(&[("r", "a")])).await;
        assert_eq!(found, code, "{message}");
        assert!(
            message.contains(path) && message.contains(RESOURCE),
            "{message}"
        );
    }
    plugin.answer(ContainerAllocation {
        device_nodes: vec![node("/dev/thing")],
        ..Default::default()
    });
    run.prepare(claim(&[("r", "a")])).await.unwrap();
    run.adapters.left(
        &resource(),
        registration,
        &Problem::unavailable("gone", "gone"),
    );
    assert_eq!(refusal(claim(&[("r", "a")])).await.0, "plugin-gone");
}

#[tokio::test(start_paused = true)]
async fn stuck_plugin_calls_end_at_deadline() {
    let home = Home::new();
    let run = home.start(vec![entry()], false).await;
    let plugin = FakePlugin::new();
    run.plug(&plugin, &[("a", true), ("b", true)]);
    plugin.shut(true);
    let (one, other) = tokio::join!(
        run.prepare(claim(&[("r", "a")])),
        run.prepare(claim(&[("r", "b")]))
    );
    assert_eq!(
        [one.unwrap_err().code, other.unwrap_err().code],
        ["driver-deadline", "driver-deadline"]
    );
    assert_eq!(
        plugin.calls().allocate.len(),
        1,
        "the other one waited for its turn"
    );
    plugin.shut(false);
    run.prepare(claim(&[("r", "b")])).await.unwrap();
}

#[tokio::test]
async fn freed_plugin_devices_are_offered() {
    let home = Home::new();
    let run = home
        .start_with(vec![entry()], false, taken(&["a", "gone"]), &[])
        .await;
    run.plug(&FakePlugin::new(), &[("a", true), ("b", true)]);
    run.until_published(&[("b", HEALTHY)]).await;
    assert_eq!(
        run.prepare(claim(&[("r", "a")])).await.unwrap_err().code,
        "device-held"
    );
    assert!(run.adapters.has_taken());
    run.adapters.set_taken(&taken(&[]));
    run.until_published(&[("a", HEALTHY), ("b", HEALTHY)]).await;
    assert!(!run.adapters.has_taken());
}

/// A replica of a GPU was offered while a pod from before had another one, and the rules said that both are the same hardware.
#[tokio::test]
async fn hardware_of_existing_pods_is_withheld() {
    let home = Home::new();
    let rules = "devices: [{ match: '(?<uuid>gpu-[0-9])-[0-9]', identity: 'gpu:${uuid}' }]";
    let text = format!("resource: {RESOURCE}\ndriver: {DRIVER}\npool: things\n{rules}\n");
    let run = home
        .start_with(vec![entry_with(&text)], false, taken(&["gpu-0-0"]), &[])
        .await;
    run.plug(
        &FakePlugin::new(),
        &[("gpu-0-0", true), ("gpu-0-1", true), ("gpu-1-0", true)],
    );
    run.until_published(&[("gpu-1-0", HEALTHY)]).await;
    let held = [("gpu:gpu-0".to_owned(), (resource(), "gpu-0-0".to_owned()))];
    assert_eq!(run.adapters.held_identities(), held.into());
    let problem = run.prepare(claim(&[("r", "gpu-0-1")])).await.unwrap_err();
    assert_eq!(problem.code, "device-held");
    assert!(
        problem.message.contains("\"gpu-0-0\"") && problem.message.contains("the same hardware")
    );
    run.prepare(claim(&[("r", "gpu-1-0")])).await.unwrap();
    run.adapters.set_taken(&taken(&[]));
    run.until_published(&[
        ("gpu-0-0", HEALTHY),
        ("gpu-0-1", HEALTHY),
        ("gpu-1-0", HEALTHY),
    ])
    .await;
    assert!(run.adapters.held_identities().is_empty());
}

/// One adapter that waited for a read from the kernel delayed the others by up to ten seconds each.
#[tokio::test]
async fn hanging_adapter_delays_no_other_adapter() {
    let home = Home::new();
    let other = entry_with("resource: example.com/aaa\ndriver: aaa.example.com\n");
    let run = home.start(vec![other, entry()], false).await;
    let hanging: ExtendedResource = "example.com/aaa".parse().unwrap();
    // Its threads wait for the kernel.
    run.adapters
        .state()
        .adapted
        .get_mut(&hanging)
        .unwrap()
        .looks = Arc::new(tokio::sync::Semaphore::new(0));
    let registration = run.adapters.arrived(&hanging, FakePlugin::new()).unwrap();
    run.adapters
        .listed(&hanging, registration, list(&[("a", true)]));
    run.plug(&FakePlugin::new(), &[("a", true)]);
    run.until_published(&[("a", HEALTHY)]).await;
    let hanging = run.registry.serving(&"aaa.example.com".parse().unwrap());
    assert!(hanging.unwrap().inventory.is_none());
}

#[tokio::test]
async fn takeover_from_kubelet_survives_restart() {
    let home = Home::new();
    let plugin = FakePlugin::new();
    let ids = |ids: &[&str]| {
        ids.iter()
            .map(|id| (*id).to_owned())
            .collect::<BTreeSet<_>>()
    };
    {
        let run = home.start(vec![entry()], true).await;
        run.plug(&plugin, &[("a", true), ("b", true)]);
        assert_eq!(
            run.adapters.awaited(),
            [(resource(), BTreeSet::new())].into()
        );
        assert!(
            run.adapters.list()[0]
                .waits_for
                .contains("the kubelet has not listed yet")
        );
        // A pod may have it by the plugin's ID.
        assert_eq!(
            run.prepare(claim(&[("r", "b")])).await.unwrap_err().code,
            "driver-not-serving"
        );
        run.adapters
            .set_held(&resource(), &ids(&["a"]))
            .await
            .unwrap();
        run.until_published(&[("b", HEALTHY)]).await;
    }
    let run = home.start(vec![entry()], true).await;
    run.plug(&plugin, &[("a", true), ("b", true)]);
    run.until_published(&[("b", HEALTHY)]).await;
    // What the kubelet lists later under the name is not of that time.
    run.adapters
        .set_held(&resource(), &ids(&["a", "b"]))
        .await
        .unwrap();
    run.until_published(&[("b", HEALTHY)]).await;
    run.adapters.set_held(&resource(), &ids(&[])).await.unwrap();
    run.until_published(&[("a", HEALTHY), ("b", HEALTHY)]).await;
    assert!(run.adapters.awaited().is_empty());
}

#[tokio::test]
async fn devices_stay_unhealthy_until_listed_again() {
    let home = Home::new();
    let run = home.start(vec![entry()], false).await;
    let registration = run.plug(&FakePlugin::new(), &[("a", true)]);
    run.until_published(&[("a", HEALTHY)]).await;
    run.adapters.left(
        &resource(),
        registration,
        &Problem::unavailable("gone", "its stream ended"),
    );
    run.until_published(&[("a", UNHEALTHY)]).await;
    let registration = run
        .adapters
        .arrived(&resource(), FakePlugin::new())
        .unwrap();
    assert_eq!(
        run.adapters.list()[0].waits_for,
        "the plugin has not listed its devices yet"
    );
    run.until_published(&[("a", UNHEALTHY)]).await;
    run.adapters
        .listed(&resource(), registration, list(&[("a", true)]));
    run.until_published(&[("a", HEALTHY)]).await;
}

#[tokio::test]
async fn conflicting_adapters_set_condition_naming_both() {
    let home = Home::new();
    let other = |text: &str| AdapterEntry {
        source: "/b.adapter.yaml".to_owned(),
        ..entry_with(text)
    };
    for text in [
        format!("resource: {RESOURCE}\ndriver: other.example.com\n"),
        format!("resource: example.com/other\ndriver: {DRIVER}\n"),
    ] {
        let run = home.start(vec![entry(), other(&text)], false).await;
        assert_eq!(
            (run.adapters.list().len(), run.codes()),
            (1, vec!["adapter-conflict".to_owned()])
        );
        let message = run.conditions.list().remove(0).problem.message;
        assert!(
            message.contains("/a.adapter.yaml") && message.contains("/b.adapter.yaml"),
            "{message}"
        );
    }
    let run = home.start(vec![entry()], false).await;
    let native = Driver {
        inventory: None,
        ..run.driver()
    };
    assert!(
        run.registry
            .serve("/plugins/thing.sock", native)
            .unwrap_err()
            .contains(RESOURCE)
    );

    // The name is another driver's, until that is gone.
    let first = run.driver();
    run.registry.retire(&source_of(&resource()));
    run.registry
        .serve(
            "/plugins/thing.sock",
            Driver {
                inventory: None,
                ..first
            },
        )
        .unwrap();
    run.adapters
        .state()
        .adapted
        .get_mut(&resource())
        .unwrap()
        .refused = Some("again".to_owned());
    run.plug(&FakePlugin::new(), &[("a", true)]);
    let refused = async {
        while !run.codes().contains(&"adapter-conflict".to_owned()) {
            tokio::task::yield_now().await
        }
    };
    tokio::time::timeout(Duration::from_secs(5), refused)
        .await
        .unwrap();
    assert!(
        run.adapters.list()[0]
            .waits_for
            .contains("/plugins/thing.sock")
    );
    run.registry.retire("/plugins/thing.sock");
    let served = async {
        while !run.codes().is_empty() {
            tokio::task::yield_now().await
        }
    };
    tokio::time::timeout(Duration::from_secs(5), served)
        .await
        .unwrap();
    run.until_published(&[("a", HEALTHY)]).await;
}

/// A step of the time before and after the adapter.
#[derive(Debug, Clone, Copy)]
enum Step {
    /// A pod of the kubelet ends, which has a device by the plugin's ID.
    End(usize),
    /// The kubelet's list is read.
    Look,
    List(usize, bool),
    Restart,
    Switch(bool),
    Leave,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0..4usize).prop_map(Step::End),
        Just(Step::Look),
        (0..16usize, any::<bool>()).prop_map(|(listed, healthy)| Step::List(listed, healthy)),
        Just(Step::Restart),
        any::<bool>().prop_map(Step::Switch),
        Just(Step::Leave),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
    /// No device that a pod has by the plugin's ID is ever published, and each is in the end.
    #[test]
    fn devices_of_earlier_pods_stay_unpublished(
        had in 0..16usize,
        steps in prop::collection::vec(step(), 1..50),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            const IDS: [&str; 4] = ["a", "b", "c", "d"];
            let of = |bits: usize| IDS.iter().enumerate().filter(move |(n, _)| bits >> n & 1 == 1).map(|(_, id)| *id);
            let home = Home::new();
            let mut held: BTreeSet<String> = of(had).map(str::to_owned).collect();
            let mut run = home.start(vec![entry()], true).await;
            let plugin = FakePlugin::new();
            let mut registration = run.adapters.arrived(&resource(), plugin.clone()).unwrap();
            let mut enabled = true;
            for step in steps {
                match step {
                    Step::End(n) => drop(held.remove(IDS[n])),
                    Step::Look => run.adapters.set_held(&resource(), &held).await.unwrap(),
                    Step::List(bits, healthy) => {
                        let devices: Vec<_> = of(bits).map(|id| (id, healthy)).collect();
                        run.adapters.listed(&resource(), registration, list(&devices));
                    }
                    Step::Restart => {
                        run = home.start(vec![entry()], true).await;
                        registration = run.adapters.arrived(&resource(), plugin.clone()).unwrap();
                    }
                    Step::Switch(to) => {
                        run.adapters.set_enabled(DRIVER, to).await.unwrap();
                        enabled = to;
                    }
                    Step::Leave => {
                        run.adapters.left(&resource(), registration, &Problem::unavailable("gone", "gone"));
                        registration = run.adapters.arrived(&resource(), plugin.clone()).unwrap();
                    }
                }
                tokio::task::yield_now().await;
                for (name, _) in run.published().unwrap_or_default() {
                    assert!(!held.contains(&name), "{name} of a pod is published after {step:?}");
                }
                assert_eq!(run.adapters.disabled().is_empty(), enabled);
            }
            run.adapters.set_held(&resource(), &BTreeSet::new()).await.unwrap();
            run.adapters.set_held(&resource(), &BTreeSet::new()).await.unwrap();
            run.adapters.listed(&resource(), registration, list(&IDS.map(|id| (id, true))));
            run.until_published(&IDS.map(|id| (id, HEALTHY))).await;
        });
    }
}
