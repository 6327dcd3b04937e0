//! The way from a driver's inventory to requests at an API server, in each version that it may serve.

use std::sync::Mutex;

use serde_json::{Value, json};

use super::super::remote::RemoteSlices;
use super::super::{Counters, SliceApi, SliceError};
use super::*;
use crate::api::fake::{self, Asked};
use crate::slices::content::of_pool;
use crate::slices::planner::Draft;
use crate::slices::view::SliceEvent;
use nodedock_base::tasks::Tasks;
use nodedock_model::ObjectName;

fn draft() -> Draft {
    let content = of_pool(&devices(1), &Default::default(), TaintEffect::NoSchedule);
    let device = content.devices["d0000"].json().clone();
    let (key, counters) = (key("gpu.example.com", "p"), Vec::new());
    Draft { key, owner: owner(), generation: 1, count: 1, devices: vec![device], counters, content }
}

/// The object of a request as a server stores it.
fn stored(asked: &Asked) -> Value {
    let mut object = asked.body.clone();
    let metadata = object["metadata"].as_object_mut().unwrap();
    metadata.entry("name").or_insert_with(|| "00000-a".into());
    metadata.insert("uid".to_owned(), "u".into());
    metadata.insert("resourceVersion".to_owned(), "7".into());
    object
}

#[tokio::test(start_paused = true)]
async fn slices_of_the_node_are_followed_and_written_in_the_version_that_is_served() {
    for version in ["v1", "v1beta2", "v1beta1"] {
        let (told, watch) = fake::open();
        let watch = Mutex::new(Some(watch));
        let (api, log) = fake::api(move |asked: Asked| {
            let answer = match (asked.method.as_str(), asked.path.as_str()) {
                ("GET", "/apis/resource.k8s.io") => fake::group(&[version]),
                ("GET", "/version") => fake::answer(200, &json!({ "major": "1", "minor": "34" })),
                ("GET", _) if asked.is_watch() => watch.lock().unwrap().take().unwrap(),
                ("GET", path) if path.ends_with("/resourceslices") => fake::list("6", &[]),
                ("GET" | "DELETE", _) => fake::refusal(404, "NotFound", "slice not found"),
                ("PUT", _) => fake::refusal(409, "Conflict", "the object has been modified"),
                _ => fake::answer(201, &stored(&asked)),
            };
            std::future::ready(answer)
        });
        let tasks = Tasks::new();
        let (slices, mut events) = RemoteSlices::follow(api, &tasks, &ObjectName::new("node-1").unwrap());
        let SliceEvent::Listed(listed) = events.events.recv().await.unwrap() else { panic!() };
        assert_eq!((listed.len(), slices.counters()), (0, Counters::Together));

        let draft = draft();
        let held = slices.create("00000-a-", &draft).await.unwrap();
        assert_eq!((&held.content, held.name.as_str()), (&draft.content, "00000-a"));
        let created = log.lock().unwrap().iter().find(|asked| asked.method == "POST").cloned().unwrap();
        assert_eq!(created.path, format!("/apis/resource.k8s.io/{version}/resourceslices"));
        assert_eq!(created.body["apiVersion"], format!("resource.k8s.io/{version}"));
        assert_eq!(created.body["spec"]["devices"][0]["basic"].is_object(), version == "v1beta1");

        told.send(fake::event("ADDED", &stored(&created))).await.unwrap();
        let SliceEvent::Changed(seen) = events.events.recv().await.unwrap() else { panic!() };
        assert_eq!(*seen, held);
        told.send(fake::event("DELETED", &stored(&created))).await.unwrap();
        let SliceEvent::Deleted { name, uid } = events.events.recv().await.unwrap() else { panic!() };
        assert_eq!((name.as_str(), uid.as_str()), ("00000-a", "u"));

        assert!(matches!(slices.update(&held, &draft).await, Err(SliceError::Conflict(_))));
        assert!(matches!(slices.delete("00000-a", "u", "7").await, Err(SliceError::NotFound(_))));
        assert_eq!(slices.get("00000-a").await, Ok(None));
        let asked = log.lock().unwrap();
        let deleted = asked.iter().find(|asked| asked.method == "DELETE").unwrap();
        assert_eq!(deleted.body["preconditions"], json!({ "uid": "u", "resourceVersion": "7" }));
        let listed = asked.iter().find(|asked| asked.path.ends_with("/resourceslices")).unwrap();
        assert!(listed.query.contains("fieldSelector=spec.nodeName%3Dnode-1"), "{}", listed.query);
        tasks.stop();
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_server_does_not_want_is_told_from_a_server_that_is_not_there() {
    for (code, reason, is_refused) in [
        (422, "Invalid", true),
        (403, "Forbidden", true),
        (429, "TooManyRequests", false),
        (500, "InternalError", false),
    ] {
        let (api, _) = fake::api(move |asked: Asked| {
            let answer = match asked.method.as_str() {
                "POST" => fake::refusal(code, reason, "no"),
                _ => fake::group(&["v1"]),
            };
            std::future::ready(answer)
        });
        let (slices, _events) = RemoteSlices::follow(api, &Tasks::new(), &ObjectName::new("node-1").unwrap());
        let outcome = slices.create("00000-a-", &draft()).await;
        assert_eq!(matches!(outcome, Err(SliceError::Refused(_))), is_refused, "{outcome:?}");
        assert_eq!(matches!(outcome, Err(SliceError::Away { .. })), !is_refused, "{outcome:?}");
    }
}
