use nodedock_stand_ins::api_server::{ApiServer, Fault, When};
use serde_json::{Value, json};
use tokio::time::sleep;

use super::*;
use crate::client::tests::over;
use crate::pools::PoolNames;
use nodedock_base::conditions::Conditions;
use nodedock_core::registry::Registry;
use nodedock_model::ObjectName;

const SOON: Duration = Duration::from_secs(1);

struct Scene {
    server: Arc<ApiServer>,
    taints: DeviceTaints,
    changes: tokio::sync::broadcast::Receiver<nodedock_model::Changed>,
    conditions: Conditions,
    _tasks: Tasks,
}

fn rule(name: &str, selector: &Value, effect: &str) -> Value {
    json!({
        "kind": "DeviceTaintRule", "metadata": { "name": name },
        "spec": { "deviceSelector": selector, "taint": { "key": "example.com/service", "effect": effect } },
    })
}

async fn server() -> Arc<ApiServer> {
    let server = Arc::new(ApiServer::start().await);
    server.serve_taint_rules();
    server.put(rule(
        "pool",
        &json!({ "driver": "gpu.example.com", "pool": "node-1/gpus" }),
        "NoExecute",
    ));
    server
}

impl Scene {
    fn start(server: Arc<ApiServer>) -> Self {
        let (tasks, changes) = (Tasks::new(), Changes::default());
        let registry = Registry::new(Changes::default(), Conditions::default(), None);
        let pools = NodePools {
            names: PoolNames {
                node: ObjectName::new("node-1").unwrap(),
            },
            registry,
        };
        let listener = changes.listen();
        let conditions = Conditions::default();
        let report = SliceReport::default();
        let taints = DeviceTaints::start(
            &tasks,
            &over(&server),
            changes,
            conditions.clone(),
            report,
            pools,
        );
        Self {
            server,
            taints,
            changes: listener,
            conditions,
            _tasks: tasks,
        }
    }

    /// Rules of `gpu.example.com/POOL/gpu-0` with their effects.
    fn of(&self, pool: &str) -> Vec<String> {
        let driver = DriverName::new("gpu.example.com").unwrap();
        let (pool, device) = (
            PoolName::new(pool).unwrap(),
            DeviceName::new("gpu-0").unwrap(),
        );
        let added = self.taints.of(&driver, &pool, &device, &[]);
        assert_eq!((added.host, added.more_rules), (vec![], 0));
        added
            .rules
            .into_iter()
            .map(|taint| format!("{} {}", taint.rule, taint.effect))
            .collect()
    }

    fn requests(&self, verb: &str) -> usize {
        let requests = self.server.requests();
        requests
            .iter()
            .filter(|seen| seen.verb == verb && seen.resource == "devicetaintrules")
            .count()
    }
}

#[tokio::test(start_paused = true)]
async fn rules_are_listed_once_then_watched() {
    let mut scene = Scene::start(server().await);
    sleep(SOON).await;
    assert_eq!(scene.of("gpus"), ["pool NoExecute"]);
    assert_eq!(scene.of("others"), Vec::<String>::new());
    let changed = scene.changes.try_recv().unwrap();
    assert_eq!(
        (changed.kind, changed.name.as_str()),
        (ChangedKind::Device, "devicetaintrules")
    );
    scene.server.put(rule("all", &json!({}), "Unheard"));
    scene
        .server
        .put(rule("pool", &json!({ "pool": "node-2/gpus" }), "NoExecute"));
    scene
        .server
        .put(rule("bad", &json!({ "driver": 7 }), "None"));
    sleep(SOON).await;
    assert_eq!(scene.of("gpus"), ["all Unheard"]);
    let conditions = scene.conditions.list();
    let (code, message) = (&conditions[0].problem.code, &conditions[0].problem.message);
    assert!(
        code == "taint-rules-left-out" && message.contains(r#""bad": spec.deviceSelector.driver"#),
        "{message}"
    );
    scene.server.delete("devicetaintrules", "", "bad");
    sleep(SOON).await;
    assert_eq!(scene.conditions.list(), []);
    scene.server.delete("devicetaintrules", "", "all");
    sleep(SOON).await;
    assert_eq!(scene.of("gpus"), Vec::<String>::new());
    assert_eq!((scene.requests("list"), scene.requests("watch")), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn rules_outlive_server_outage() {
    let scene = Scene::start(server().await);
    sleep(SOON).await;
    let away = scene.server.fail(Fault::Status(503), When::any());
    scene.server.close_watches();
    sleep(Duration::from_secs(300)).await;
    assert_eq!(scene.of("gpus"), ["pool NoExecute"]);
    scene.server.delete("devicetaintrules", "", "pool");
    scene.server.lift(away);
    sleep(API_RETRY_MAX * 4).await;
    assert_eq!(scene.of("gpus"), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn forbidden_rules_taint_nothing() {
    let server = server().await;
    server.deny("list", "devicetaintrules");
    let scene = Scene::start(server);
    sleep(TAINT_RULES_RETRY * 3 + SOON).await;
    assert_eq!(scene.of("gpus"), Vec::<String>::new());
    assert_eq!((scene.requests("list"), scene.requests("watch")), (4, 0));
    scene.server.allow_all();
    sleep(TAINT_RULES_RETRY).await;
    assert_eq!(scene.of("gpus"), ["pool NoExecute"]);
    // The right is taken away: what is not known any more is not shown.
    scene.server.deny("watch", "devicetaintrules");
    scene.server.deny("list", "devicetaintrules");
    scene.server.close_watches();
    sleep(API_RETRY_MAX).await;
    assert_eq!(scene.of("gpus"), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn unserved_rules_are_found_later() {
    let scene = Scene::start(Arc::new(ApiServer::start().await));
    scene.server.put(rule("all", &json!({}), "NoSchedule"));
    sleep(SOON).await;
    assert_eq!((scene.of("gpus").len(), scene.requests("list")), (0, 0));
    scene.server.serve_taint_rules();
    sleep(TAINT_RULES_RETRY).await;
    assert_eq!(scene.of("gpus"), ["all NoSchedule"]);
}

#[tokio::test(start_paused = true)]
async fn rules_wait_for_a_serving_version() {
    for (versions, served) in [
        (&["v1beta1"][..], None),
        (&["v1beta1", "v1beta2"], Some("v1beta2")),
        (&[], None),
    ] {
        let server = server().await;
        server.serve_versions(versions);
        let scene = Scene::start(server);
        sleep(SOON).await;
        assert_eq!(
            scene.of("gpus").len(),
            usize::from(served.is_some()),
            "{versions:?}"
        );
        assert_eq!(
            scene.requests("list"),
            usize::from(served.is_some()),
            "{versions:?}"
        );
        scene.server.serve_versions(&["v1", "v1beta1"]);
        scene.server.close_watches();
        sleep(TAINT_RULES_RETRY + API_RETRY_MAX * 2).await;
        assert_eq!(scene.of("gpus"), ["pool NoExecute"], "{versions:?}");
    }
}
