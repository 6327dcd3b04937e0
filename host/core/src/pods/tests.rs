//! Pods over a real claim manager, with a device manager that does as it is told.

mod node;

use super::{CHOICES_MAX, PodOutcome, ResourceState};
use crate::claims::PodSelector;
use nodedock_model::{ClaimState, ContainerAllocation, ContainerKind, PodContainer, Problem};

use node::{Node, PLUGIN, POOL, cdi, claim, container, pod, pooled_uid, request};

/// What became of each claim and each resource, by code where it was refused.
fn ends(outcome: &PodOutcome) -> (Vec<&str>, Vec<&str>) {
    let claims = outcome.claims.iter();
    let claims = claims.map(|c| c.end.as_ref().map_or_else(|p| p.code.as_str(), |end| end.as_str()));
    let resources = outcome.resources.iter();
    let resources = resources.map(|r| r.end.as_ref().map_or_else(|p| p.code.as_str(), |_| "ok"));
    (claims.collect(), resources.collect())
}

fn no_plugin() -> Problem {
    Problem::unavailable("plugin-gone", "the plugin is not here")
}

fn response(name: &str) -> ContainerAllocation {
    ContainerAllocation {
        env: [("NIC".to_owned(), "0".to_owned())].into(),
        annotations: [("by".to_owned(), "plugin".to_owned()), ("only".to_owned(), "plugin".to_owned())]
            .into(),
        cdi_devices: vec![name.to_owned()],
        ..ContainerAllocation::default()
    }
}

#[tokio::test]
async fn a_pod_with_nothing_but_claims_asks_no_device_manager() {
    let (node, a) = (Node::start(), pod("a"));
    let one = claim("one", "gpu-0", &a);
    let outcome = node.prepare(&request(&a, &["one"], &[]), &[one]).await;
    assert_eq!(ends(&outcome), (vec!["prepared"], vec![]));
    assert_eq!(outcome.containers[0].allocation.cdi_devices, [cdi("claim-one", "gpu-0")]);
    assert_eq!(node.pods.pod("uid-a").unwrap().containers, outcome.containers);
    assert_eq!(ends(&node.unprepare(&a).await[0]), (vec!["unprepared"], vec![]));
    assert_eq!(*node.devices.calls.borrow(), Vec::<String>::new());
    assert!(node.unprepare(&a).await.is_empty(), "what is unknown is done");
}

#[tokio::test]
async fn claims_pools_and_plugins_come_in_one_answer_that_a_repeat_gives_again() {
    let (node, a) = (Node::start(), pod("a"));
    node.devices.choose(&["pool/gpu-1"]);
    node.devices.respond(response("nic.example.com/nic=0"));
    let wanted = request(&a, &["one"], &[(PLUGIN, 1), (POOL, 1)]);
    let one = [claim("one", "gpu-0", &a)];
    let outcome = node.prepare(&wanted, &one).await;
    assert_eq!(ends(&outcome), (vec!["prepared"], vec!["ok", "ok"]));
    assert_eq!(outcome.resources[0].end.as_ref().unwrap()["pool/gpu-1"], [0]);
    let [main] = outcome.containers.as_slice() else { panic!("{outcome:#?}") };
    let pooled = cdi(&pooled_uid(&a, "main"), "gpu-1");
    let names = [cdi("claim-one", "gpu-0"), pooled, "nic.example.com/nic=0".to_owned()];
    assert_eq!(main.allocation.cdi_devices, names, "claims come before plugins");
    assert_eq!(main.allocation.env["NIC"], "0");
    let annotations: Vec<_> = main.allocation.annotations.values().map(String::as_str).collect();
    assert_eq!(annotations, ["claim", "plugin"], "the first is right");
    assert!(main.conflicts.len() == 1 && main.conflicts[0].contains("annotation by"), "{:?}", main.conflicts);

    assert_eq!(node.prepare(&wanted, &one).await, outcome);
    let view = node.pods.pod("uid-a").unwrap();
    assert_eq!((view.claims.len(), view.resources.len()), (1, 2), "a pool's claim is a resource");
    assert_eq!((&view.containers, view.state()), (&outcome.containers, ClaimState::Prepared));
    assert!(view.resources.iter().all(|resource| resource.state == ResourceState::Allocated));
    assert_eq!((node.pods.pods().len(), node.pods.pods_count()), (1, 1));

    let outcome = &node.unprepare(&a).await[0];
    assert_eq!(ends(outcome), (vec!["unprepared"], vec!["ok", "ok"]));
    assert!(node.claims.list().is_empty() && !node.pods.might_need_unprepare("uid-a"));
}

#[tokio::test]
async fn a_claim_of_a_pods_own_cannot_take_the_place_of_a_pools() {
    let (node, a) = (Node::start(), pod("a"));
    node.devices.choose(&["pool/gpu-1"]);
    let mut usurper = claim("p-main", "gpu-7", &a);
    usurper.id.uid = nodedock_model::Uid::new(pooled_uid(&a, "main")).unwrap();
    let outcome = node.prepare(&request(&a, &[], &[(POOL, 1)]), &[usurper]).await;
    assert_eq!(outcome.containers[0].allocation.cdi_devices, [cdi(&pooled_uid(&a, "main"), "gpu-1")]);
}

#[tokio::test]
async fn containers_are_answered_when_nothing_is_refused_and_not_before() {
    let (node, a) = (Node::start(), pod("a"));
    node.devices.refuse_plugin(Some(no_plugin()));
    let wanted = request(&a, &["one"], &[(PLUGIN, 1)]);
    let one = [claim("one", "gpu-0", &a)];
    let outcome = node.prepare(&wanted, &one).await;
    assert_eq!(ends(&outcome), (vec!["prepared"], vec!["plugin-gone"]));
    assert!(outcome.containers.is_empty());

    node.devices.refuse_plugin(None);
    let outcome = node.prepare(&wanted, &[claim("one", "gpu-0", &pod("b"))]).await;
    assert_eq!((ends(&outcome).1, outcome.containers.len()), (vec!["ok"], 0), "the claim is another's");
    let outcome = node.prepare(&wanted, &one).await;
    assert_eq!((ends(&outcome), outcome.containers.len()), ((vec!["prepared"], vec!["ok"]), 1));
}

#[tokio::test]
async fn a_resource_that_nobody_answers_for_is_refused() {
    let (node, a) = (Node::start(), pod("a"));
    node.devices.fall_silent();
    let outcome = node.prepare(&request(&a, &[], &[(PLUGIN, 1)]), &[]).await;
    assert_eq!((ends(&outcome), outcome.containers.len()), ((vec![], vec!["interrupted"]), 0));
}

#[tokio::test]
async fn a_request_that_comes_to_no_end_is_refused_as_a_whole() {
    let (node, a) = (Node::start(), pod("a"));
    node.devices.panic();
    let outcome = node.prepare(&request(&a, &["one"], &[(PLUGIN, 1)]), &[]).await;
    assert_eq!(ends(&outcome), (vec!["interrupted"], vec!["interrupted"]));
}

#[tokio::test]
async fn other_devices_are_chosen_when_somebody_was_faster() {
    let (node, a, b) = (Node::start(), pod("a"), pod("b"));
    node.prepare(&request(&b, &["one"], &[]), &[claim("one", "gpu-0", &b)]).await;
    node.devices.choose(&["pool/gpu-0", "pool/gpu-1"]);
    let outcome = node.prepare(&request(&a, &[], &[(POOL, 1)]), &[]).await;
    assert_eq!(ends(&outcome), (vec![], vec!["ok"]));
    assert!(outcome.resources[0].end.as_ref().unwrap().contains_key("pool/gpu-1"), "{outcome:?}");
    assert_eq!(outcome.containers[0].allocation.cdi_devices, [cdi(&pooled_uid(&a, "main"), "gpu-1")]);
    assert_eq!(node.devices.count("reallocate"), 1);
}

#[tokio::test]
async fn choosing_anew_has_an_end() {
    let (node, a, b) = (Node::start(), pod("a"), pod("b"));
    node.prepare(&request(&b, &["one"], &[]), &[claim("one", "gpu-0", &b)]).await;
    node.devices.choose(&["pool/gpu-0"; CHOICES_MAX + 1]);
    let outcome = node.prepare(&request(&a, &[], &[(POOL, 1)]), &[]).await;
    assert_eq!((ends(&outcome), outcome.containers.len()), ((vec![], vec!["device-held"]), 0));
    assert_eq!(node.devices.count("reallocate"), CHOICES_MAX - 1);
}

#[tokio::test]
async fn where_no_other_device_is_left_the_resource_is_refused_and_the_rest_goes_on() {
    let (node, a, b) = (Node::start(), pod("a"), pod("b"));
    node.prepare(&request(&b, &["one"], &[]), &[claim("one", "gpu-0", &b)]).await;
    node.devices.choose(&["pool/gpu-0"]);
    node.devices.choose_nothing(Problem::unavailable("too-few-devices", "none is free"));
    let outcome = node.prepare(&request(&a, &["two"], &[(POOL, 1)]), &[claim("two", "gpu-2", &a)]).await;
    assert_eq!(ends(&outcome), (vec!["prepared"], vec!["too-few-devices"]));
    assert!(outcome.containers.is_empty());
}

#[tokio::test]
async fn an_unprepare_frees_what_plugins_gave_although_a_driver_is_away() {
    let (node, a) = (Node::start(), pod("a"));
    node.devices.choose(&["pool/gpu-0"]);
    node.prepare(&request(&a, &["one"], &[(PLUGIN, 1), (POOL, 1)]), &[claim("one", "gpu-1", &a)]).await;
    node.driver_goes();
    // The allocation is gone after the first; what the pool gave is still known by its claim.
    for resources in [vec!["no-such-driver", "ok"], vec!["no-such-driver"]] {
        let outcome = node.unprepare(&a).await.remove(0);
        let (claims, of_resources) = ends(&outcome);
        assert_eq!((claims.len(), of_resources.len()), (1, resources.len()), "{outcome:#?}");
        assert!(outcome.claims[0].end.is_err() && outcome.resources[0].end.is_err(), "{outcome:#?}");
        assert_eq!(outcome.resources[0].resource.as_str(), POOL);
        assert!(outcome.resources[1..].iter().all(|resource| resource.end.is_ok()), "{outcome:#?}");
    }
    assert_eq!(node.devices.count("free"), 1);
    let view = node.pods.pod("uid-a").unwrap();
    assert_eq!((view.state(), view.claims.len()), (ClaimState::Unpreparing, 1));
    let [gpu] = view.resources.as_slice() else { panic!("{view:#?}") };
    assert_eq!((gpu.state, gpu.devices.contains_key("pool/gpu-0")), (ResourceState::Freeing, true));
    assert!(node.pods.might_need_unprepare("uid-a"));

    node.driver_comes();
    assert_eq!(ends(&node.unprepare(&a).await[0]), (vec!["unprepared"], vec!["ok"]));
    assert!(node.pods.pod("uid-a").is_none() && !node.pods.might_need_unprepare("uid-a"));
}

#[tokio::test]
async fn what_cannot_be_freed_is_said_and_tried_again_by_the_next_unprepare() {
    let (node, a) = (Node::start(), pod("a"));
    node.prepare(&request(&a, &[], &[(PLUGIN, 1)]), &[]).await;
    node.devices.refuse_free(Some(Problem::unavailable("checkpoint-disk-full", "no room")));
    assert_eq!(ends(&node.unprepare(&a).await[0]).1, ["checkpoint-disk-full"]);
    assert!(node.pods.might_need_unprepare("uid-a"));
    node.devices.refuse_free(None);
    assert_eq!(ends(&node.unprepare(&a).await[0]).1, ["ok"]);
    assert!(!node.pods.might_need_unprepare("uid-a"));
}

#[tokio::test]
async fn pods_that_only_have_devices_are_found_by_name_beside_those_with_claims() {
    let node = Node::start();
    let (old, new) = (pod("a"), nodedock_model::ObjectRef { uid: "uid-new".parse().unwrap(), ..pod("a") });
    node.prepare(&request(&old, &["one"], &[]), &[claim("one", "gpu-0", &old)]).await;
    node.prepare(&request(&new, &[], &[(PLUGIN, 1)]), &[]).await;
    node.prepare(&request(&pod("b"), &[], &[(PLUGIN, 1)]), &[]).await;
    assert_eq!((node.pods.pods().len(), node.pods.pods_count()), (3, 3));
    let named = PodSelector::Name(old.namespace.clone(), old.name.clone());
    let found = node.pods.named(old.namespace.clone(), old.name.clone());
    assert_eq!(found.into_iter().map(|view| view.pod).collect::<Vec<_>>(), [old.clone(), new.clone()]);
    let outcomes = node.pods.unprepare_pod(named, "test".into()).await.unwrap();
    let pods: Vec<_> = outcomes.iter().map(|outcome| outcome.pod.uid.as_str()).collect();
    assert_eq!(pods, ["uid-a", "uid-new"]);
    let left: Vec<_> = node.pods.pods().into_iter().map(|view| view.pod).collect();
    assert_eq!(left, [pod("b")]);
}

#[tokio::test]
async fn an_unprepare_finds_what_a_prepare_under_way_will_have_taken() {
    let (node, a) = (Node::start(), pod("a"));
    node.devices.open.send_replace(false);
    let prepare = tokio::spawn({
        let (pods, wanted) = (node.pods.clone(), request(&a, &[], &[(PLUGIN, 1)]));
        async move { pods.prepare_pod(wanted, vec![], "test".into()).await }
    });
    node.devices.calls.subscribe().wait_for(|calls| !calls.is_empty()).await.unwrap();
    let mut unprepare = Box::pin(node.unprepare(&a));
    assert!(futures::poll!(&mut unprepare).is_pending());
    node.devices.open.send_replace(true);
    assert_eq!(ends(&unprepare.await[0]).1, ["ok"]);
    assert_eq!(ends(&prepare.await.unwrap()).1, ["ok"]);
    assert!(!node.pods.might_need_unprepare("uid-a"));
}

#[tokio::test]
async fn a_request_goes_on_when_its_caller_goes_away() {
    let (node, a) = (Node::start(), pod("a"));
    node.devices.open.send_replace(false);
    let wanted = request(&a, &["one"], &[(PLUGIN, 1)]);
    let mut prepare = Box::pin(node.pods.prepare_pod(wanted, vec![claim("one", "gpu-0", &a)], "test".into()));
    assert!(futures::poll!(&mut prepare).is_pending());
    drop(prepare);
    node.devices.open.send_replace(true);
    assert!(node.tasks.drain(std::time::Duration::from_secs(60)).await);
    let view = node.pods.pod("uid-a").unwrap();
    assert_eq!((view.state(), view.claims.len(), view.resources.len()), (ClaimState::Prepared, 1, 1));
}

#[tokio::test]
async fn plugins_are_told_before_each_start_of_a_container_that_has_their_devices() {
    let (node, a) = (Node::start(), pod("a"));
    node.devices.respond(response("nic.example.com/nic=0"));
    let mut wanted = request(&a, &["one"], &[]);
    wanted.containers.push(container("nic", &[(PLUGIN, 1)]));
    let outcome = node.prepare(&wanted, &[claim("one", "gpu-0", &a)]).await;
    assert_eq!(node.start_container(&a, "main").await.unwrap(), outcome.containers[0]);
    assert_eq!(node.devices.count("pre_start main"), 0);
    for starts in [1, 2] {
        assert_eq!(node.start_container(&a, "nic").await.unwrap(), outcome.containers[1]);
        assert_eq!(node.devices.count("pre_start nic"), starts);
    }
    node.devices.refuse_start(Some(no_plugin()));
    assert_eq!(node.start_container(&a, "nic").await.unwrap_err().code, "plugin-gone");
    assert_eq!(node.start_container(&a, "other").await.unwrap_err().code, "no-such-container");
    assert_eq!(node.start_container(&pod("b"), "main").await.unwrap_err().code, "no-such-pod");
}

#[tokio::test]
async fn a_container_starts_when_its_pod_is_prepared_and_not_before() {
    let (node, a) = (Node::start(), pod("a"));
    let wanted = request(&a, &["one"], &[(PLUGIN, 1)]);
    node.prepare(&wanted, &[claim("one", "gpu-0", &a)]).await;
    node.devices.forget_response(&a);
    let problem = node.start_container(&a, "main").await.unwrap_err();
    assert!(problem.code == "pod-not-prepared" && problem.message.contains(PLUGIN), "{problem:?}");
    assert_eq!(node.pods.pod("uid-a").unwrap().state(), ClaimState::Preparing);

    node.unprepare(&a).await;
    node.prepare(&wanted, &[claim("one", "gpu-0", &a)]).await;
    node.driver_goes();
    node.unprepare(&a).await;
    let problem = node.start_container(&a, "main").await.unwrap_err();
    assert!(problem.code == "pod-not-prepared" && problem.message.contains("default/one"), "{problem:?}");
    assert_eq!(node.devices.count("pre_start main"), 0);
}

#[tokio::test]
async fn a_pod_that_only_has_devices_needs_nothing_for_its_other_containers() {
    let (node, a) = (Node::start(), pod("a"));
    let mut wanted = request(&a, &[], &[(PLUGIN, 1)]);
    wanted.containers.push(PodContainer { kind: ContainerKind::App, ..container("plain", &[]) });
    let outcome = node.prepare(&wanted, &[]).await;
    assert_eq!(outcome.containers.len(), 2);
    assert_eq!(node.start_container(&a, "plain").await.unwrap(), outcome.containers[1]);
}
