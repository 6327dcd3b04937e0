//! Health, several instances, and a server or a Node object that is replaced.

use std::time::Duration;

use serde_json::{Value, json};

use super::super::DriverSnapshot;
use super::super::entry::UNHEALTHY;
use super::reconcile::{
    Daemon, is_there, names, none, pass, publishing, server, serving, slices, writes,
};
use super::*;
use crate::facts::NODE_READ_MAX;
use crate::slices::BindingRule;
use crate::slices::health::SLICE_TAINT_HOLD;
use nodedock_model::{AttributeValue, BindingConditions, CounterSet, ProblemCode, QualifiedName};
use nodedock_stand_ins::api_server::{Fault, When};

/// Value and time of each taint.
fn taints(server: &nodedock_stand_ins::api_server::ApiServer) -> Vec<(String, String)> {
    let text = |taint: &Value, field: &str| taint[field].as_str().unwrap().to_owned();
    let slices = server.list("resourceslices");
    let devices = slices
        .iter()
        .flat_map(|slice| slice["spec"]["devices"].as_array().into_iter().flatten());
    let taints = devices.flat_map(|device| device["taints"].as_array().into_iter().flatten());
    taints
        .map(|taint| {
            (
                taint["value"].as_str().unwrap_or_default().to_owned(),
                text(taint, "timeAdded"),
            )
        })
        .collect()
}

fn healthy() -> Published {
    with_health(
        published(&[("p", &devices(3))]),
        "p",
        1,
        HealthState::Healthy,
    )
}

fn unhealthy() -> Published {
    because("it is hot")
}

fn because(message: &str) -> Published {
    let mut published = with_health(
        published(&[("p", &devices(3))]),
        "p",
        1,
        HealthState::Unhealthy,
    );
    published
        .health
        .values_mut()
        .for_each(|health| message.clone_into(&mut health.message));
    published
}

#[tokio::test(start_paused = true)]
async fn unhealthy_device_is_tainted_until_stable() {
    let (server, daemon) = publishing(&healthy()).await;
    writes(&server);
    daemon.serve(unhealthy());
    pass(1).await;
    let since = taints(&server);
    assert_eq!(
        (writes(&server).len(), since.len(), &since[0].0[..]),
        (1, 1, "it-is-hot")
    );
    // It flaps, each time for another reason.
    for minute in 0..10 {
        daemon.serve(healthy());
        pass(10).await;
        daemon.serve(because(&format!("hot for {minute} minutes")));
        pass(10).await;
    }
    server.kubelet_starts(NODE);
    pass(2).await;
    assert_eq!(
        (writes(&server).len(), taints(&server)),
        (1, since),
        "the wipe alone"
    );
    assert_eq!(*daemon.unhealthy.lock(), ["it is hot"]);
    daemon.serve(healthy());
    pass(SLICE_TAINT_HOLD.as_secs() + 2).await;
    assert_eq!((writes(&server).len(), taints(&server)), (1, Vec::new()));
    pass(600).await;
    assert_eq!(writes(&server), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn taint_keeps_time_across_writes() {
    let (server, daemon) = publishing(&healthy()).await;
    daemon.serve(unhealthy());
    pass(5).await;
    // As if the server had added it long ago: its clock is not the test's.
    let name = &names(&server)[0];
    server.edit("resourceslices", "", name, |slice| {
        let devices = slice["spec"]["devices"].as_array_mut().unwrap();
        let tainted = devices
            .iter_mut()
            .find(|device| device["taints"] != Value::Null)
            .unwrap();
        tainted["taints"][0]["timeAdded"] = json!("2026-01-01T00:00:00Z");
    });
    pass(60).await;
    let since = taints(&server);
    assert_eq!(
        (since.len(), since[0].1.as_str()),
        (1, "2026-01-01T00:00:00Z")
    );
    writes(&server);
    let more = with_health(
        published(&[("p", &devices(4))]),
        "p",
        1,
        HealthState::Unhealthy,
    );
    daemon.serve(more);
    pass(5).await;
    assert_eq!((writes(&server).len(), taints(&server)), (1, since));
}

#[tokio::test(start_paused = true)]
async fn eviction_continues_after_restart() {
    let server = server().await;
    let effects = || -> Vec<Value> {
        let slices = server.list("resourceslices");
        let devices: Vec<_> = slices
            .iter()
            .flat_map(|slice| slice["spec"]["devices"].as_array().unwrap().clone())
            .collect();
        let taints = devices
            .iter()
            .flat_map(|device| device["taints"].as_array().cloned().unwrap_or_default());
        taints.map(|taint| taint["effect"].clone()).collect()
    };
    let after = Duration::from_secs(300);
    let daemon = Daemon::start_evicting(&server, serving(GPU, unhealthy()), after);
    pass(290).await;
    assert_eq!(effects(), ["NoSchedule"]);
    pass(20).await;
    assert_eq!(effects(), ["NoExecute"], "without another report");
    let tainted = |own: &[Taint]| {
        let (driver, pool) = (driver(GPU), PoolName::new("p").unwrap());
        let taints = daemon
            .report
            .host_taints(&driver, &pool, &device_name(1), own);
        assert_eq!(
            daemon
                .report
                .host_taints(&driver, &pool, &device_name(0), own),
            []
        );
        let taint = taints.into_iter().next()?;
        assert_eq!(
            (taint.key.as_str(), taint.value.as_str()),
            (UNHEALTHY, "it-is-hot")
        );
        Some(taint.effect)
    };
    assert_eq!(
        tainted(&[taint("x")]),
        Some(TaintEffect::NoExecute),
        "as the slice has it"
    );
    // The driver has it by itself, or there is no room for one more.
    assert_eq!(
        tainted(&[Taint {
            key: UNHEALTHY.to_owned(),
            ..taint("x")
        }]),
        None
    );
    assert_eq!(
        (
            tainted(&vec![taint("x"); 15]),
            tainted(&vec![taint("x"); 16])
        ),
        (Some(TaintEffect::NoExecute), None)
    );
    daemon.stop().await;
    writes(&server);
    let daemon = Daemon::start_evicting(&server, serving(GPU, unhealthy()), after);
    pass(10).await;
    assert_eq!(
        (writes(&server).len(), effects()),
        (0, vec![json!("NoExecute")])
    );
    daemon.serve(healthy());
    pass(SLICE_TAINT_HOLD.as_secs() + 2).await;
    assert_eq!(effects(), Vec::<Value>::new());
    // As if the server had added the taint long before a restart.
    daemon.serve(unhealthy());
    pass(5).await;
    assert_eq!(effects(), ["NoSchedule"]);
    daemon.stop().await;
    server.edit("resourceslices", "", &names(&server)[0], |slice| {
        slice["spec"]["devices"][1]["taints"][0]["timeAdded"] = json!("2026-01-01T00:00:00Z");
    });
    let _daemon = Daemon::start_evicting(&server, serving(GPU, unhealthy()), after);
    pass(5).await;
    assert_eq!(effects(), ["NoExecute"]);
}

/// A change of the config was seen at the next start alone.
#[tokio::test(start_paused = true)]
async fn changed_settings_apply_to_written_slices() {
    let server = server().await;
    let effects = || -> Vec<Value> {
        let slices = server.list("resourceslices");
        let devices = slices
            .iter()
            .flat_map(|slice| slice["spec"]["devices"].as_array().cloned());
        let taints = devices
            .flatten()
            .flat_map(|device| device["taints"].as_array().cloned());
        taints
            .flatten()
            .map(|taint| taint["effect"].clone())
            .collect()
    };
    let daemon = Daemon::start(&server, serving(GPU, unhealthy()));
    pass(100).await;
    assert_eq!(effects(), ["NoSchedule"]);
    daemon
        .settings
        .send_modify(|settings| settings.evict_after = Some(Duration::from_secs(60)));
    pass(3).await;
    assert_eq!(effects(), ["NoExecute"], "it has been unhealthy for longer");
    daemon
        .settings
        .send_modify(|settings| settings.evict_after = None);
    pass(3).await;
    assert_eq!(effects(), ["NoSchedule"]);
    let rule = BindingRule {
        driver: driver(GPU),
        pool: None,
        conditions: BindingConditions {
            conditions: vec!["example.com/ready".to_owned()],
            failures: vec!["example.com/failed".to_owned()],
        },
    };
    daemon
        .settings
        .send_modify(|settings| settings.binding = vec![rule]);
    pass(3).await;
    let device = &server.list("resourceslices")[0]["spec"]["devices"][0];
    assert_eq!(device["bindingConditions"], json!(["example.com/ready"]));
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn restart_keeps_a_flapping_devices_taint() {
    let server = server().await;
    let daemon = Daemon::start(&server, serving(GPU, unhealthy()));
    pass(5).await;
    let since = taints(&server);
    daemon.stop().await;
    writes(&server);
    let daemon = Daemon::start(&server, serving(GPU, because("still hot")));
    pass(5).await;
    daemon.serve(healthy());
    pass(20).await;
    assert_eq!(*daemon.unhealthy.lock(), [""; 0]);
    assert_eq!((writes(&server).len(), taints(&server)), (0, since));
    pass(20).await;
    assert_eq!((writes(&server).len(), taints(&server)), (1, Vec::new()));
    // By hand, or by an instance that is gone: the driver has nothing new to report from here on.
    let name = names(&server).remove(0);
    server.edit("resourceslices", "", &name, |object| {
        object["spec"]["devices"][0]["taints"] =
            json!([{ "key": UNHEALTHY, "effect": "NoSchedule", "timeAdded": "2026-01-01T00:00:00Z" }]);
    });
    pass(SLICE_TAINT_HOLD.as_secs() / 2).await;
    assert_eq!(taints(&server).len(), 1);
    pass(SLICE_TAINT_HOLD.as_secs()).await;
    assert_eq!(taints(&server), Vec::new());
}

#[tokio::test(start_paused = true)]
async fn two_instances_converge() {
    let (server, old) = publishing(&published(&[("p", &devices(300))])).await;
    writes(&server);
    let new = Daemon::start(&server, serving(GPU, published(&[("p", &devices(300))])));
    pass(60).await;
    assert_eq!(writes(&server), Vec::<String>::new());
    let had = published(&[("p", &devices(500))]);
    old.serve(had.clone());
    new.serve(had.clone());
    pass(60).await;
    assert!(is_there(&server, &had));
    writes(&server);
    pass(600).await;
    let writes = writes(&server);
    assert!(writes.len() <= 8, "{writes:?}");
    old.stop().await;
    server.kubelet_starts(NODE);
    pass(60).await;
    assert!(is_there(&server, &had));
}

#[tokio::test(start_paused = true)]
async fn slices_follow_the_node_object() {
    let (server, had) = (server().await, published(&[("p", &devices(300))]));
    server.delete("nodes", "", NODE);
    let daemon = Daemon::start(&server, none());
    daemon.serve(had.clone());
    pass(60).await;
    assert_eq!(writes(&server), Vec::<String>::new());
    server.add_node(NODE);
    pass(NODE_READ_MAX.as_secs() + 5).await;
    assert!(is_there(&server, &had));
    writes(&server);
    server.delete("nodes", "", NODE);
    let second = server.add_node(NODE);
    daemon.facts.read_again();
    pass(5).await;
    assert_eq!(writes(&server).len(), 3);
    for slice in slices(&server) {
        let owners = serde_json::to_value(&slice.metadata.owner_references).unwrap();
        let owner = json!({ "apiVersion": "v1", "kind": "Node", "name": NODE, "uid": second, "controller": true });
        assert_eq!((owners, slice.spec.pool.generation), (json!([owner]), 1));
    }
}

#[tokio::test(start_paused = true)]
async fn native_plugin_owns_its_slices() {
    let (server, daemon) = publishing(&published(&[("p", &devices(2))])).await;
    let present = std::collections::BTreeSet::from([driver(GPU)]);
    daemon.drivers.send_replace(DriverSnapshot {
        native: present.clone(),
        present,
        ..none()
    });
    pass(5).await;
    writes(&server);
    server.kubelet_starts(NODE);
    pass(60).await;
    assert_eq!(writes(&server), Vec::<String>::new());
    assert_eq!(daemon.report.pools(), Default::default());
}

#[tokio::test(start_paused = true)]
async fn refused_pool_is_written_after_upgrade() {
    let server = server().await;
    server.report_minor_version("34");
    let set = |value: &str| CounterSet {
        name: "memory".to_owned(),
        counters: [("bytes".to_owned(), value.to_owned())].into(),
    };
    let mut pool = devices(100);
    pool.shared_counters = vec![set("100")];
    pool.devices
        .values_mut()
        .for_each(|device| device.consumes = vec![set("1")]);
    let had = published(&[("p", &pool)]);
    let daemon = Daemon::start(&server, serving(GPU, had.clone()));
    pass(60).await;
    assert_eq!(
        (writes(&server).len(), daemon.codes()),
        (0, vec![ProblemCode::SlicesRefused.to_string()])
    );
    server.report_minor_version("36");
    server.skip_versions(1);
    server.compact();
    server.close_watches();
    pass(60).await;
    assert!(is_there(&server, &had));
    assert_eq!(daemon.codes(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn refused_list_attributes_are_omitted() {
    let server = server().await;
    let mut pool = devices(3);
    let links = QualifiedName::new("links").unwrap();
    for device in pool.devices.values_mut() {
        device
            .attributes
            .insert(links.clone(), AttributeValue::Texts(vec!["a".to_owned()]));
    }
    let had = published(&[("p", &pool)]);
    server.fail_times(
        1,
        Fault::Status(422),
        When::any().resource("resourceslices").verb("create"),
    );
    let daemon = Daemon::start(&server, serving(GPU, had.clone()));
    pass(5).await;
    assert!(is_there(&server, &published(&[("p", &devices(3))])));
    let conditions = daemon.conditions.list();
    let [condition] = &conditions[..] else {
        panic!("{conditions:?}")
    };
    assert_eq!(
        condition.problem.code,
        ProblemCode::SliceFieldsDropped.as_str()
    );
    assert!(condition.problem.message.contains("links"), "{condition:?}");
    writes(&server);
    pass(600).await;
    assert_eq!(writes(&server), Vec::<String>::new());
    // The server may have learned them when its watch ends.
    server.skip_versions(1);
    server.compact();
    server.close_watches();
    pass(60).await;
    assert!(is_there(&server, &had));
    assert_eq!(daemon.codes(), Vec::<String>::new());

    // A refusal for another reason stays one.
    server.fail(
        Fault::Status(422),
        When::any().resource("resourceslices").verb("update"),
    );
    let mut more = devices(4);
    more.devices.values_mut().for_each(|device| {
        device
            .attributes
            .clone_from(&pool.devices[&device_name(0)].attributes)
    });
    daemon.serve(published(&[("p", &more)]));
    pass(60).await;
    assert_eq!(daemon.codes(), [ProblemCode::SlicesRefused.as_str()]);
    server.lift_all();
    pass(600).await;
    assert!(is_there(&server, &published(&[("p", &more)])));
}
