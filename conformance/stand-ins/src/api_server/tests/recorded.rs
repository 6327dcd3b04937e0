//! Every recorded request is sent again, in its order, and the answers are compared: what a server makes up itself (names, UIDs,
//! versions, times) must be there, and everything else the same.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::{Value, json};

use super::client::{self, Asking};
use crate::api_server::ApiServer;

const MADE_UP: [&str; 9] = [
    "uid",
    "resourceVersion",
    "creationTimestamp",
    "deletionTimestamp",
    "timeAdded",
    "allocationTimestamp",
    "shareID",
    "storageVersionHash",
    "name of its own",
];

fn fixture(name: &str) -> Value {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/kubernetes-1.36");
    serde_json::from_slice(&std::fs::read(directory.join(name)).unwrap()).unwrap()
}

fn fixtures() -> Vec<(String, Value)> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/kubernetes-1.36");
    let names = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| !name.starts_with("watch")).collect();
    names.sort();
    names
        .into_iter()
        .map(|name| (name.clone(), fixture(&name)))
        .collect()
}

/// Map from generated values of a recording to those that this server generated instead.
#[derive(Default)]
struct Names(BTreeMap<String, String>);

impl Names {
    /// Looks at two answers to the same request side by side.
    fn learn(&mut self, recorded: &Value, ours: &Value) {
        match (recorded, ours) {
            (Value::Object(recorded), Value::Object(ours)) => {
                for (key, recorded) in recorded {
                    let ours = ours.get(key).unwrap_or(&Value::Null);
                    match (recorded.as_str(), ours.as_str()) {
                        (Some(old), Some(new))
                            if matches!(key.as_str(), "uid" | "name" | "resourceVersion") =>
                        {
                            self.0.insert(old.to_owned(), new.to_owned());
                        }
                        _ => self.learn(recorded, ours),
                    }
                }
            }
            (Value::Array(recorded), Value::Array(ours)) => {
                recorded
                    .iter()
                    .zip(ours)
                    .for_each(|(recorded, ours)| self.learn(recorded, ours));
            }
            _ => {}
        }
    }

    fn text(&self, text: &str) -> String {
        if let Some(new) = self.0.get(text) {
            return new.clone();
        }
        // A name in a path or a message; versions are too short to be looked for there.
        let long = self
            .0
            .iter()
            .filter(|(old, new)| old.len() > 8 && old != new);
        long.fold(text.to_owned(), |text, (old, new)| {
            text.replace(old.as_str(), new)
        })
    }

    /// A recorded value as it would be here.
    fn here(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => self.text(text).into(),
            Value::Array(items) => items.iter().map(|item| self.here(item)).collect(),
            Value::Object(fields) => fields
                .iter()
                .map(|(key, value)| (key.clone(), self.here(value)))
                .collect(),
            other => other.clone(),
        }
    }
}

/// Returns a value without the parts that cannot be equal.
fn comparable(value: &Value) -> Value {
    match value {
        Value::Object(fields) if fields.get("code") == Some(&json!(422)) => refusal(value),
        Value::Object(fields) => fields
            .iter()
            .filter(|(key, _)| *key != "managedFields")
            .map(|(key, value)| {
                let made_up = MADE_UP.contains(&key.as_str()) && value.is_string();
                (
                    key.clone(),
                    if made_up {
                        "made up".into()
                    } else {
                        comparable(value)
                    },
                )
            })
            .collect(),
        Value::Array(items) => items.iter().map(comparable).collect(),
        other => other.clone(),
    }
}

/// A refusal of an invalid object: its causes by reason and field. The messages are of each server its own, and a real server may list a
/// cause twice.
fn refusal(status: &Value) -> Value {
    let causes = status["details"]["causes"].as_array();
    let causes: BTreeSet<_> = causes
        .into_iter()
        .flatten()
        .map(|cause| (cause["reason"].to_string(), cause["field"].to_string()))
        .collect();
    let mut refusal = status.clone();
    refusal["details"]["causes"] = json!(causes);
    refusal["message"] = "of this server".into();
    refusal
}

/// Applies changes that other clients than the recorded one made before an exchange.
fn before(server: &ApiServer, number: u32, recorded: &Value, names: &Names) {
    let body = &recorded["response"]["body"];
    match number {
        // The client took the taint away again.
        15 => {
            let name = names.text("node-1-gpu-d2fxm");
            server.edit("resourceslices", "", &name, |slice| {
                slice["spec"]["devices"][0]
                    .as_object_mut()
                    .unwrap()
                    .remove("taints");
            });
        }
        // The scheduler, and the clients that created pods and claims; one of them with space in the parameters.
        25..=39 => {
            let uid = server.put(names.here(body))["metadata"]["uid"]
                .as_str()
                .unwrap()
                .to_owned();
            if number == 34 {
                server.shared.space(&uid);
            }
        }
        // Claims of templates and extended resources.
        40 => {
            for item in body["items"].as_array().unwrap() {
                let name = item["metadata"]["name"].as_str().unwrap();
                if server.get("resourceclaims", "default", name).is_none() {
                    let mut claim = item.clone();
                    claim["kind"] = "ResourceClaim".into();
                    server.put(names.here(&claim));
                }
            }
        }
        42 => server.require_tokens(&["the right one"]),
        43 => server.require_tokens(&[]),
        // The claim controller.
        49 => server.deallocate_claim("default", "gpu-and-nic"),
        _ => {}
    }
}

#[tokio::test]
async fn recorded_exchanges_get_the_same_answers() {
    let server = ApiServer::start().await;
    server.put(fixture("03-node-get.json")["response"]["body"].clone());
    server.put(json!({ "kind": "Namespace", "metadata": { "name": "default" } }));
    let mut names = Names::default();
    let mut differ = vec![];
    for (name, recorded) in fixtures() {
        let number: u32 = name[..2].parse().unwrap();
        before(&server, number, &recorded, &names);
        let request = &recorded["request"];
        let body = match &request["body"] {
            Value::Null => String::new(),
            Value::String(text) => names.text(text),
            // The recorded client wrote its JSON with space.
            body => format!("{:#}", names.here(body)),
        };
        let path = names.text(request["path"].as_str().unwrap());
        let asking = Asking {
            method: request["method"].as_str().unwrap(),
            kind: request["contentType"].as_str().unwrap_or_default(),
            body: &body,
            ..Asking::get(&path)
        };
        let answer = client::try_ask(&server, &asking)
            .await
            .unwrap_or_else(|| panic!("{name}: no answer"));
        let response = &recorded["response"];
        names.learn(&response["body"], &answer.body);
        let (theirs, ours) = (
            comparable(&names.here(&response["body"])),
            comparable(&answer.body),
        );
        if response["status"] != answer.code || theirs != ours {
            differ.push(format!(
                "{name}: {}\n  recorded {theirs}\n  here     {} {ours}",
                response["status"], answer.code
            ));
        }
    }
    assert!(differ.is_empty(), "{}", differ.join("\n"));
}

#[tokio::test]
async fn recorded_watch_gets_the_same_events() {
    let recorded = fixture("watch-resourceclaims.json");
    let recorded = recorded.as_array().unwrap();
    let server = ApiServer::start().await;
    let path = "/apis/resource.k8s.io/v1/resourceclaims?watch=true&allowWatchBookmarks=true\
                &sendInitialEvents=true&resourceVersionMatch=NotOlderThan";
    let mut watch = client::watch(&server, path).await;
    let mut ours = vec![watch.next().await.unwrap()];
    for event in &recorded[1..] {
        match event["type"].as_str().unwrap() {
            "BOOKMARK" => server.bookmark(),
            _ => drop(server.put(event["object"].clone())),
        }
        ours.push(watch.next().await.unwrap());
    }
    for (recorded, ours) in recorded.iter().zip(&ours) {
        assert_eq!(comparable(recorded), comparable(ours));
    }
}
