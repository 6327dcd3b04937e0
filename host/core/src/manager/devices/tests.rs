//! Allocations, with fake plugins on a real checkpoint.

mod history;
mod interrupted;
mod life;
mod pools;

use std::collections::BTreeMap;
use std::sync::Arc;

use super::HintScope;
use super::fixtures::{device, ids, pod, resource, sick, uid};
use nodedock_model::{AllocationMount, ContainerAllocation, ContainerKind, PluginDevice, Problem};

use crate::manager::tests::scene::{
    Daemon, FakePlugin, Home, Preference, app, container, device_ends, device_request,
};

fn numbered(count: usize) -> Vec<PluginDevice> {
    (0..count)
        .map(|n| device(&format!("dev{n}"), &[u32::from(n % 2 == 1)]))
        .collect()
}

/// A daemon with a plugin of `example.com/gpu` that lists so many devices.
fn plugged(devices: usize) -> (Home, Daemon, Arc<FakePlugin>) {
    plugged_with(FakePlugin::new(), devices)
}

fn plugged_with(gpu: Arc<FakePlugin>, devices: usize) -> (Home, Daemon, Arc<FakePlugin>) {
    let home = Home::new();
    let daemon = home.start_at_once();
    daemon.plug("gpu", &gpu, &numbered(devices));
    (home, daemon, gpu)
}

impl Daemon {
    /// The devices that the container of a pod is given of each resource, or the codes of the problems.
    async fn given(&self, pod: &str, wants: &[(&str, u32)]) -> Vec<String> {
        device_ends(&self.allocate(pod, &app(wants)).await)
    }
}

fn env(name: &str) -> ContainerAllocation {
    ContainerAllocation {
        env: BTreeMap::from([(name.to_owned(), "1".to_owned())]),
        ..Default::default()
    }
}

#[tokio::test]
async fn containers_get_devices_until_exhausted() {
    let (home, gpu, nic) = (Home::new(), FakePlugin::new(), FakePlugin::new());
    let daemon = home.start_at_once();
    daemon.plug("gpu", &gpu, &numbered(2));
    daemon.plug("nic", &nic, &numbered(2));
    gpu.answer(env("GPU"));
    let first = daemon.allocate("a", &app(&[("gpu", 2), ("nic", 1)])).await;
    assert_eq!(device_ends(&first), ["dev0,dev1", "dev0"]);
    assert_eq!(
        first[0].end.as_ref().unwrap()["dev1"],
        [1],
        "with its NUMA nodes"
    );
    let second = daemon.allocate("b", &app(&[("gpu", 1), ("nic", 1)])).await;
    assert_eq!(
        device_ends(&second),
        ["too-few-devices", "dev1"],
        "what there is is given all the same"
    );
    assert_eq!(gpu.calls().allocate, [ids(&["dev0", "dev1"])]);
    assert_eq!(nic.calls().allocate, [ids(&["dev0"]), ids(&["dev1"])]);

    let held = daemon.manager.pods.get("uid-a").unwrap().containers;
    assert_eq!(held[0].allocation, env("GPU"), "as the plugin said it");
    let view = daemon.view("gpu").unwrap();
    assert_eq!(view.devices[1].pods, [pod("a")]);
    assert_eq!(
        (view.capacity(), view.allocatable()),
        (2, 2),
        "allocated or not"
    );
    assert_eq!(daemon.manager.pods.list().len(), 2);
}

#[tokio::test]
async fn resource_without_healthy_device_is_refused() {
    let (home, gpu) = (Home::new(), FakePlugin::new());
    let daemon = home.start_at_once();
    daemon.plug("gpu", &gpu, &[sick("a")]);
    let refused = daemon.allocate("a", &app(&[("gpu", 1), ("nic", 1)])).await;
    assert_eq!(
        device_ends(&refused),
        ["no-healthy-device", "resource-unknown"]
    );
    assert!(daemon.is_empty());
    assert_eq!(daemon.commits(), 0);
}

#[tokio::test]
async fn repeated_request_needs_no_plugin() {
    let (home, gpu) = (Home::new(), FakePlugin::new());
    let daemon = home.start_at_once();
    let id = daemon.plug("gpu", &gpu, &numbered(4));
    gpu.answer(env("GPU"));
    let first = daemon.allocate("a", &app(&[("gpu", 2)])).await;
    let commits = daemon.commits();
    assert_eq!(commits, 2, "the intent, and the result");
    assert_eq!(daemon.allocate("a", &app(&[("gpu", 2)])).await, first);
    daemon
        .manager
        .devices
        .plugin_left(&id, &Problem::unavailable("eof", "its stream ended"));
    assert_eq!(daemon.allocate("a", &app(&[("gpu", 2)])).await, first);
    for changed in [0, 1, 3] {
        assert_eq!(
            daemon.given("a", &[("gpu", changed)]).await,
            ["request-changed"]
        );
    }
    assert_eq!((gpu.calls().allocate.len(), daemon.commits()), (1, commits));
    let devices = daemon.devices_of("a");
    daemon.stop().await;

    let daemon = home.start_at_once();
    assert_eq!(daemon.devices_of("a"), devices);
    assert_eq!(daemon.allocate("a", &app(&[("gpu", 2)])).await, first);
    daemon.plug("gpu", &gpu, &numbered(3));
    let other = daemon.allocate("b", &app(&[("gpu", 1)])).await;
    assert_eq!(
        device_ends(&other),
        ["dev2"],
        "the others are taken since before the start"
    );
    assert_eq!(gpu.calls().allocate.len(), 2);
}

#[tokio::test]
async fn only_init_container_devices_are_reused() {
    use ContainerKind::{App, Init, Sidecar};
    let (home, gpu) = (Home::new(), FakePlugin::new());
    let daemon = home.start_at_once();
    let flat: Vec<_> = (0..4).map(|n| device(&format!("dev{n}"), &[])).collect();
    daemon.plug("gpu", &gpu, &flat);
    let pod = [
        container("app-1", App, &[("gpu", 1)]),
        container("app-2", App, &[("gpu", 2)]),
        container("init-1", Init, &[("gpu", 1)]),
        container("sidecar", Sidecar, &[("gpu", 1)]),
        container("init-2", Init, &[("gpu", 3)]),
    ];
    let outcomes = daemon.allocate("a", &pod).await;
    let names: Vec<_> = outcomes
        .iter()
        .map(|outcome| outcome.container.as_str())
        .collect();
    assert_eq!(
        names,
        ["app-1", "app-2", "init-1", "sidecar", "init-2"],
        "in the pod's order"
    );
    assert_eq!(
        device_ends(&outcomes),
        ["dev1", "dev2,dev3", "dev0", "dev0", "dev1,dev2,dev3"]
    );
    assert_eq!(gpu.calls().allocate.len(), 5, "once for each container");
    daemon.stop().await;
    let daemon = home.start_at_once();
    assert_eq!(daemon.allocate("a", &pod).await, outcomes);
}

#[tokio::test]
async fn unavailable_preferred_devices_are_ignored() {
    let (_home, daemon, gpu) =
        plugged_with(FakePlugin::preferring(&["dev3", "dev9", "dev0", "dev2"]), 4);
    assert_eq!(daemon.given("a", &[("gpu", 1)]).await, ["dev3"]);
    let mut near = app(&[("gpu", 1)]);
    near[0].numa_affinity = vec![0];
    assert_eq!(device_ends(&daemon.allocate("b", &near).await), ["dev0"]);
    let asked = gpu.calls().preferred;
    assert_eq!(
        asked[0],
        (ids(&["dev0", "dev1", "dev2", "dev3"]), vec![], 1)
    );
    assert_eq!(
        asked[1],
        (ids(&["dev0", "dev2"]), vec![], 1),
        "only those that are where it should be"
    );
}

/// A daemon whose pods wait for devices, with a plugin that lists so many.
fn waiting(devices: usize) -> (Home, Daemon, Arc<FakePlugin>, super::PluginId) {
    let (home, gpu) = (Home::new(), FakePlugin::new());
    let daemon = home.start();
    let id = daemon.plug("gpu", &gpu, &numbered(devices));
    (home, daemon, gpu, id)
}

/// A pod was refused while the one that it replaced still had its device, where a claim waits.
#[tokio::test]
async fn pod_waits_for_freed_devices() {
    let (_home, daemon, _, _) = waiting(2);
    daemon.given("old", &[("gpu", 2)]).await;
    let (wanted, more) = (app(&[("gpu", 2)]), app(&[("gpu", 1)]));
    let mut first = std::pin::pin!(daemon.allocate("new", &wanted));
    let mut second = std::pin::pin!(daemon.allocate("late", &more));
    assert!(futures::poll!(&mut first).is_pending() && futures::poll!(&mut second).is_pending());
    daemon.free("old").await.unwrap();
    assert_eq!(device_ends(&first.await), ["dev0,dev1"]);
    assert!(futures::poll!(&mut second).is_pending());
    daemon.free("new").await.unwrap();
    assert_eq!(device_ends(&second.await), ["dev0"]);
}

#[tokio::test]
async fn pod_waits_for_devices_listed_unhealthy() {
    let (_home, daemon, _, id) = waiting(1);
    daemon.manager.devices.plugin_listed(&id, &[sick("dev0")]);
    let wanted = app(&[("gpu", 1)]);
    let mut pod = std::pin::pin!(daemon.allocate("a", &wanted));
    assert!(futures::poll!(&mut pod).is_pending());
    daemon
        .manager
        .devices
        .plugin_listed(&id, &[device("dev0", &[])]);
    assert_eq!(device_ends(&pod.await), ["dev0"]);
}

#[tokio::test(start_paused = true)]
async fn pod_waits_only_for_existing_devices() {
    let home = Home::new();
    let daemon = home.start_with("boot-1", std::time::Duration::from_secs(5));
    let id = daemon.plug("gpu", &FakePlugin::new(), &[sick("dev0")]);
    let started = tokio::time::Instant::now();
    assert_eq!(
        daemon.given("a", &[("gpu", 2), ("nic", 1)]).await,
        ["no-healthy-device", "resource-unknown"]
    );
    assert_eq!(started.elapsed().as_secs(), 0);
    assert_eq!(
        daemon.given("a", &[("gpu", 1)]).await,
        ["no-healthy-device"]
    );
    assert_eq!(started.elapsed().as_secs(), 5);
    daemon
        .manager
        .devices
        .plugin_listed(&id, &[device("dev0", &[]), sick("dev1")]);
    assert_eq!(daemon.given("a", &[("gpu", 2)]).await, ["too-few-devices"]);
    assert_eq!(started.elapsed().as_secs(), 10);
    assert_eq!(daemon.commits(), 0);
}

#[tokio::test]
async fn waiting_pod_reserves_nothing() {
    let (_home, daemon, _, _) = waiting(3);
    daemon.given("old", &[("gpu", 2)]).await;
    let both = [
        container("one", ContainerKind::App, &[("gpu", 1)]),
        container("two", ContainerKind::App, &[("gpu", 2)]),
    ];
    let mut pod = std::pin::pin!(daemon.allocate("new", &both));
    assert!(futures::poll!(&mut pod).is_pending());
    assert_eq!(daemon.given("small", &[("gpu", 1)]).await, ["dev2"]);
    daemon.free("old").await.unwrap();
    assert!(futures::poll!(&mut pod).is_pending());
    daemon.free("small").await.unwrap();
    assert_eq!(device_ends(&pod.await), ["dev0", "dev1,dev2"]);
}

impl Daemon {
    /// The conditions of a resource.
    fn conditions_of(&self, short: &str) -> Vec<String> {
        let list = self.conditions.list();
        let of = list
            .iter()
            .filter(|condition| condition.subject == resource(short).as_str());
        of.map(|condition| condition.problem.to_string()).collect()
    }
}

/// One lost GPU made every GetPreferredAllocation of a plugin fail, and no pod started (NVIDIA/k8s-device-plugin#2038).
#[tokio::test(start_paused = true)]
async fn failed_preference_does_not_refuse_pods() {
    let (_home, daemon, gpu) = plugged_with(FakePlugin::preferring(&["dev3"]), 8);
    gpu.prefer(Preference::Failure);
    assert_eq!(daemon.given("a", &[("gpu", 2)]).await, ["dev0,dev1"]);
    let [condition] = &daemon.conditions_of("gpu")[..] else {
        panic!("one condition")
    };
    assert!(
        condition.contains("GetPreferredAllocation") && condition.contains("GPU is lost"),
        "{condition}"
    );
    gpu.prefer(Preference::of(&["dev3"]));
    assert_eq!(daemon.given("b", &[("gpu", 1)]).await, ["dev2"]);
    assert_eq!(gpu.calls().preferred.len(), 1);
    tokio::time::advance(std::time::Duration::from_secs(60)).await;
    assert_eq!(daemon.given("c", &[("gpu", 1)]).await, ["dev3"]);
    assert!(daemon.conditions_of("gpu").is_empty());

    // A plugin that registers again is called at once.
    gpu.prefer(Preference::Failure);
    assert_eq!(daemon.given("d", &[("gpu", 1)]).await, ["dev4"]);
    let again = FakePlugin::preferring(&["dev7"]);
    daemon.plug("gpu", &again, &numbered(8));
    assert!(daemon.conditions_of("gpu").is_empty());
    assert_eq!(daemon.given("e", &[("gpu", 1)]).await, ["dev7"]);
}

#[tokio::test(start_paused = true)]
async fn hanging_preference_costs_five_seconds() {
    let (_home, daemon, gpu) = plugged_with(FakePlugin::preferring(&["dev3"]), 4);
    let started = tokio::time::Instant::now();
    gpu.prefer(Preference::Silence);
    for (pod, given) in [("a", "dev0"), ("b", "dev1")] {
        assert_eq!(daemon.given(pod, &[("gpu", 1)]).await, [given]);
        assert_eq!(
            (started.elapsed().as_secs(), gpu.calls().preferred.len()),
            (5, 1)
        );
    }
    assert!(daemon.conditions_of("gpu")[0].contains("did not answer in time"));
}

#[tokio::test]
async fn usable_part_of_preference_is_used() {
    let (_home, daemon, gpu) = plugged_with(FakePlugin::preferring(&[]), 3);
    let list = [
        device("g0", &[]),
        device("g1", &[]),
        device("g2", &[]),
        sick("g3"),
    ];
    daemon.plug("gpu", &gpu, &list);
    for (answer, size, given, fault) in [
        (&["zz"][..], 1, "g0", Some("\"zz\" was not offered")),
        (&["g3"], 1, "g0", Some("\"g3\" was not offered")),
        (&["g3", "g2"], 1, "g2", Some("\"g3\" was not offered")),
        (
            &["g2", "g1", "g0"],
            2,
            "g1,g2",
            Some("3 devices are named, 2 are wanted"),
        ),
        (&["g1", "g1"], 2, "g0,g1", Some("named twice")),
        (&[], 1, "g0", None),
        (&["g1"], 2, "g0,g1", None),
    ] {
        gpu.prefer(Preference::of(answer));
        assert_eq!(
            daemon.given("a", &[("gpu", size)]).await,
            [given],
            "{answer:?}"
        );
        let conditions = daemon.conditions_of("gpu");
        assert_eq!(
            conditions.len(),
            usize::from(fault.is_some()),
            "{conditions:?}"
        );
        assert!(
            fault.is_none_or(|fault| conditions[0].contains(fault)),
            "{conditions:?}"
        );
        daemon.free("a").await.unwrap();
    }
    assert_eq!(gpu.calls().preferred.len(), 7, "it is called each time");
}

/// Some plugins list units of memory, of which a container wants thousands.
#[tokio::test]
async fn container_may_have_thousands_of_devices() {
    let (home, gpu) = (Home::new(), FakePlugin::new());
    let daemon = home.start_at_once();
    daemon.plug("gpu", &gpu, &numbered(20_000));
    let outcome = daemon.allocate("a", &app(&[("gpu", 12_000)])).await;
    assert_eq!(outcome[0].end.as_ref().unwrap().len(), 12_000);
    assert_eq!(
        daemon.given("b", &[("gpu", 8_001)]).await,
        ["too-few-devices"]
    );
    daemon.stop().await;
    let daemon = home.start_at_once();
    daemon.plug("gpu", &gpu, &numbered(20_000));
    assert_eq!(
        daemon.allocate("b", &app(&[("gpu", 8_000)])).await[0]
            .end
            .as_ref()
            .unwrap()
            .len(),
        8_000
    );
    daemon.free("a").await.unwrap();
}

#[tokio::test]
async fn refused_resource_does_not_affect_others() {
    let (home, gpu, nic) = (Home::new(), FakePlugin::new(), FakePlugin::new());
    let daemon = home.start_at_once();
    daemon.plug("gpu", &gpu, &numbered(1));
    daemon.plug("nic", &nic, &numbered(1));
    gpu.refuse(Problem::internal("broken", "the plugin cannot"));
    let refused = daemon.allocate("a", &app(&[("gpu", 1), ("nic", 1)])).await;
    assert_eq!(device_ends(&refused), ["broken", "dev0"]);
    assert_eq!(daemon.devices_of("a").len(), 1);
    assert_eq!(
        daemon.given("b", &[("gpu", 1)]).await,
        ["dev0"],
        "its device is free"
    );
    assert_eq!(
        daemon.given("a", &[("gpu", 1), ("nic", 1)]).await,
        ["too-few-devices", "dev0"]
    );
    gpu.refuse(Problem::internal("broken", "the plugin cannot"));
    daemon.free("b").await.unwrap();
    daemon.free("a").await.unwrap();
    daemon.allocate("c", &app(&[("gpu", 1)])).await;
    daemon.stop().await;
    assert!(
        home.start_at_once().is_empty(),
        "a pod that was given nothing has no record"
    );
}

#[tokio::test]
async fn answer_with_missing_path_is_refused() {
    let (_home, daemon, gpu) = plugged(1);
    let mount = |host: &str| AllocationMount {
        host_path: host.to_owned(),
        container_path: "/lib/gpu".to_owned(),
        read_only: true,
    };
    gpu.answer(ContainerAllocation {
        mounts: vec![mount("/no/lib")],
        ..Default::default()
    });
    assert_eq!(
        daemon.given("a", &[("gpu", 1)]).await,
        ["allocation-path-missing"]
    );
    gpu.answer(ContainerAllocation {
        mounts: vec![mount("/dev")],
        ..Default::default()
    });
    assert_eq!(daemon.given("a", &[("gpu", 1)]).await, ["dev0"]);
}

#[tokio::test]
async fn shown_counts_cover_allocated_devices() {
    let (_home, daemon, _) = plugged(4);
    daemon.allocate("a", &app(&[("gpu", 2)])).await;
    daemon.allocate("b", &app(&[("gpu", 1)])).await;
    let covered = |pod: &str, shown: &[(&str, u64)]| {
        let mut shown: BTreeMap<_, _> = shown
            .iter()
            .map(|(short, count)| (resource(short), *count))
            .collect();
        daemon
            .manager
            .devices
            .cover_allocated(&uid(pod), &mut shown);
        shown
            .into_iter()
            .map(|(name, count)| (name.as_str()["example.com/".len()..].to_owned(), count))
            .collect::<Vec<_>>()
    };
    let of = |pairs: &[(&str, u64)]| {
        pairs
            .iter()
            .map(|(name, n)| ((*name).to_owned(), *n))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        covered("a", &[("gpu", 1), ("nic", 1)]),
        of(&[("gpu", 3), ("nic", 1)])
    );
    assert_eq!(covered("a", &[("gpu", 7)]), of(&[("gpu", 7)]));
    assert_eq!(covered("b", &[]), of(&[("gpu", 3)]));
    assert_eq!(covered("stranger", &[("gpu", 1)]), of(&[("gpu", 1)]));
}

#[tokio::test]
async fn last_device_goes_to_one_pod() {
    let (_home, daemon, gpu) = plugged_with(FakePlugin::preferring(&["dev0"]), 1);
    gpu.shut(true);
    let names: Vec<_> = (0..10).map(|n| format!("pod-{n}")).collect();
    let wanted = app(&[("gpu", 1)]);
    let race = futures::future::join_all(names.iter().map(|name| daemon.allocate(name, &wanted)));
    let open = async {
        gpu.called(|calls| calls.allocate.len() == 1 || calls.preferred.len() == 1)
            .await;
        gpu.shut(false);
    };
    let (outcomes, ()) = tokio::join!(race, open);
    let given: Vec<_> = outcomes
        .iter()
        .flat_map(|outcome| device_ends(outcome))
        .collect();
    assert_eq!(
        given.iter().filter(|end| *end == "dev0").count(),
        1,
        "{given:?}"
    );
    assert_eq!(
        given.iter().filter(|end| *end == "too-few-devices").count(),
        9,
        "{given:?}"
    );
    assert_eq!(gpu.calls().allocate.len(), 1);
}

#[tokio::test]
async fn hints_consider_held_and_reusable_devices() {
    use ContainerKind::{App, Init};
    let (_home, daemon, _) = plugged(4);
    let hints = |short: &str, containers: &[_], scope| {
        let hints = daemon
            .manager
            .choices
            .hints(&device_request(short, containers), scope);
        let words = |hint: &super::TopologyHint| (hint.numa_nodes.clone(), hint.preferred);
        hints
            .iter()
            .map(|h| {
                (
                    h.container.clone(),
                    h.hints
                        .as_ref()
                        .map(|list| list.iter().map(words).collect::<Vec<_>>()),
                )
            })
            .collect::<Vec<_>>()
    };
    let (either, both) = (
        vec![(vec![0], true), (vec![1], true), (vec![0, 1], false)],
        vec![(vec![0, 1], true)],
    );
    let two = [
        container("one", App, &[("gpu", 2), ("unknown", 1)]),
        container("two", App, &[("gpu", 2)]),
    ];
    let of = |name: &str, list: &Vec<_>| (name.to_owned(), Some(list.clone()));
    assert_eq!(
        hints("a", &two, HintScope::Container),
        [of("one", &either), of("two", &either)]
    );
    assert_eq!(hints("a", &two, HintScope::Pod), [of("", &both)]);

    let mut near = [container("init", Init, &[("gpu", 2)])];
    near[0].numa_affinity = vec![1];
    assert_eq!(
        device_ends(&daemon.allocate("a", &near).await),
        ["dev1,dev3"]
    );
    let again = [
        container("init", Init, &[("gpu", 2)]),
        container("one", App, &[("gpu", 3)]),
    ];
    let held = vec![(vec![1], true), (vec![0, 1], false)];
    assert_eq!(
        hints("a", &again, HintScope::Container),
        [of("init", &held), of("one", &both)]
    );
    assert_eq!(
        hints("b", &two[..1], HintScope::Container),
        [of("one", &vec![(vec![0], true), (vec![0, 1], false)])]
    );
    assert_eq!(
        hints("b", &app(&[("gpu", 3)]), HintScope::Pod),
        [of("", &vec![])]
    );
    assert_eq!(hints("b", &app(&[("gpu", 0)]), HintScope::Container), []);
}

#[tokio::test]
async fn hints_are_computed_while_lists_change() {
    let (home, gpu) = (Home::new(), FakePlugin::new());
    let daemon = home.start_at_once();
    let id = daemon.plug("gpu", &gpu, &numbered(8));
    let (devices, few, many) = (daemon.manager.devices.clone(), numbered(2), numbered(8));
    let lists = std::thread::spawn(move || {
        for n in 0..500 {
            devices.plugin_listed(&id, if n % 2 == 0 { &few } else { &many });
        }
    });
    let request = device_request("a", &app(&[("gpu", 4)]));
    loop {
        let is_last = lists.is_finished();
        for scope in [HintScope::Container, HintScope::Pod] {
            let hints = daemon
                .manager
                .choices
                .hints(&request, scope)
                .remove(0)
                .hints
                .unwrap();
            assert!(
                matches!(hints.len(), 0 | 3),
                "of one list or the other: {hints:?}"
            );
        }
        if is_last {
            break;
        }
    }
    lists.join().unwrap();
}
