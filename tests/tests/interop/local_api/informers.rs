//! Informers of the official client library, over the life of the daemon.

use std::collections::BTreeMap;

use nodedock_tests::drivers::{Form, MOCK_GPU, MOCK_GPU_NAME};
use nodedock_tests::machine::or_skip;
use serde_json::{Value, json};
use tokio::process::Command;

use super::{Machine, claim, class};
use crate::programs::{self, Running};

/// Objects by kind and name: their UIDs and resource versions.
type Objects = BTreeMap<(String, String), (String, String)>;

/// A running informer, and what its events say that there is.
struct Informer {
    running: Running,
    objects: Objects,
    synced: bool,
    /// Queries of requests, with the status of the answer.
    requests: Vec<Value>,
    failures: usize,
}

impl Informer {
    /// Starts it with options. None, and a line that says why, on a machine that cannot have it.
    fn start(machine: &Machine, options: &[&str]) -> Option<Self> {
        let program = or_skip("informers of client-go", programs::go("informer"))?;
        let mut command = Command::new(program);
        command
            .arg("--kubeconfig")
            .arg(machine.kubeconfig())
            .args(options);
        let running = Running::start(command);
        Some(Self {
            running,
            objects: Objects::new(),
            synced: false,
            requests: Vec::new(),
            failures: 0,
        })
    }

    /// Takes events until something holds.
    async fn until(&mut self, what: &str, holds: impl Fn(&Self) -> bool) {
        while !holds(self) {
            self.next(what).await;
        }
    }

    /// Takes the next event, which is waited for until something holds.
    async fn next(&mut self, what: &str) {
        let event = self.running.event(what, |_| true).await;
        let text = |field: &str| event[field].as_str().unwrap_or_default().to_owned();
        let key = (text("resource"), text("name"));
        let object = (text("uid"), text("resourceVersion"));
        match event["event"].as_str() {
            Some("add") => assert_eq!(
                self.objects.insert(key, object),
                None,
                "{event} is there already"
            ),
            Some("update") => {
                let before = self.objects.insert(key, object);
                assert!(
                    before.is_some_and(|(uid, _)| uid == text("uid")),
                    "{event} was not there"
                );
            }
            Some("delete") => assert!(self.objects.remove(&key).is_some(), "{event} was not there"),
            Some("synced") => self.synced = true,
            Some("request") => self.requests.push(event),
            Some("failed") => self.failures += 1,
            _ => panic!("no event: {event}"),
        }
    }

    fn has(&self, claim: &str) -> bool {
        self.objects
            .contains_key(&("resourceclaims".to_owned(), claim.to_owned()))
    }
}

impl Machine {
    async fn objects(&self) -> Objects {
        let mut objects = Objects::new();
        for resource in ["resourceclaims", "resourceslices"] {
            let list = self.kubectl(&["get", resource, "-o", "json"]).await.json();
            for object in list["items"].as_array().expect("a list") {
                let text = |field: &str| {
                    object["metadata"][field]
                        .as_str()
                        .expect("a text")
                        .to_owned()
                };
                let key = (resource.to_owned(), text("name"));
                objects.insert(key, (text("uid"), text("resourceVersion")));
            }
        }
        objects
    }

    /// Waits until the informer has what kubectl lists.
    async fn until_seen(&self, informer: &mut Informer) {
        loop {
            // After the last event: if that was not all, there is another one.
            let listed = self.objects().await;
            if informer.objects == listed {
                return;
            }
            informer
                .next(&format!("the informer has {listed:#?}"))
                .await;
        }
    }
}

#[tokio::test]
async fn informer_streams_list_and_changes() {
    let Some(machine) = Machine::with_gpus().await else {
        return;
    };
    machine.allocated("before").await;
    let Some(mut informer) = Informer::start(&machine, &[]) else {
        return;
    };
    informer
        .until("it has its first list", |informer| informer.synced)
        .await;
    machine.until_seen(&mut informer).await;
    assert!(informer.has("before"));
    for request in &informer.requests {
        // A list is none of these: the first watch brings the objects.
        let query = &request["query"];
        assert_eq!(
            (&query["watch"], &query["sendInitialEvents"]),
            (&json!("true"), &json!("true")),
            "{request}"
        );
        assert_eq!(request["status"], 200, "{request}");
    }
    assert_eq!(informer.requests.len(), 2, "{:?}", informer.requests);

    machine.allocated("after").await;
    machine
        .kubectl(&["label", "resourceclaim/after", "a=1"])
        .await
        .done();
    machine.until_seen(&mut informer).await;
    machine
        .kubectl(&["delete", "resourceclaim", "before", "after"])
        .await
        .done();
    informer
        .until("the claims are gone", |informer| {
            !informer.has("before") && !informer.has("after")
        })
        .await;
    machine.until_seen(&mut informer).await;
    assert_eq!(informer.failures, 0);
}

#[tokio::test]
async fn informer_sees_changes_across_restart() {
    let Some(mut machine) = Machine::start().await else {
        return;
    };
    machine
        .apply("class", &class("gpu", MOCK_GPU_NAME))
        .await
        .done();
    machine
        .apply("stays", &claim("stays", "gpu", json!({})))
        .await
        .done();
    let Some(mut informer) = Informer::start(&machine, &["--reconnect"]) else {
        return;
    };
    informer
        .until("it has its first list", |informer| informer.synced)
        .await;

    for round in 0..3 {
        let name = format!("round-{round}");
        // What was answered is durable, and the informer may not have seen it when the daemon dies.
        machine
            .apply(&name, &claim(&name, "gpu", json!({})))
            .await
            .done();
        machine.crash().await;
        if round == 1 {
            // The slices are from a driver that came between two deaths.
            machine.serve(MOCK_GPU, Form::Core).await;
            machine.until_allocated("stays").await;
        }
        let earlier = format!("round-{}", round - 1);
        if round > 0 {
            machine
                .kubectl(&["delete", "resourceclaim", &earlier])
                .await
                .done();
        }
        machine.until_seen(&mut informer).await;
        assert!(informer.has("stays") && informer.has(&name) && !informer.has(&earlier));
    }
}
