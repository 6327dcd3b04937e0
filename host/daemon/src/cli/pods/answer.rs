//! The answers about pods, for people and for scripts.

use std::collections::BTreeMap;

use anyhow::Result;
use nodedock_proto::node::v1;
use serde::Serialize;

use super::super::Outcome;
use super::super::get::Ref;
use super::super::output::{Format, Rows, print, printable, say};

#[derive(Serialize)]
pub(super) struct Answer {
    pod: Ref,
    claims: Vec<ClaimOutcome>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    resources: Vec<ResourceOutcome>,
    #[serde(skip_serializing_if = "Option::is_none")]
    containers: Option<Vec<Container>>,
    /// What kept containers from their start.
    #[serde(skip)]
    failed: Vec<String>,
}

impl Answer {
    pub(super) fn prepared(answer: v1::PreparePodResponse, failed: Vec<String>) -> Self {
        Self {
            pod: answer.pod.unwrap_or_default().into(),
            claims: answer.claims.into_iter().map(Into::into).collect(),
            resources: answer.resources.into_iter().map(Into::into).collect(),
            containers: Some(answer.containers.into_iter().map(Into::into).collect()),
            failed,
        }
    }

    pub(super) fn given_up(answer: v1::UnpreparePodResponse) -> Self {
        Self {
            pod: answer.pod.unwrap_or_default().into(),
            claims: answer.claims.into_iter().map(Into::into).collect(),
            resources: answer.resources.into_iter().map(Into::into).collect(),
            containers: None,
            failed: Vec::new(),
        }
    }

    fn name(&self) -> String {
        format!("{}/{}", self.pod.namespace, self.pod.name)
    }
}

#[derive(Serialize)]
pub(in super::super) struct ResourceOutcome {
    pub(in super::super) container: String,
    pub(in super::super) resource: String,
    pub(in super::super) devices: Vec<String>,
    pub(in super::super) outcome: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<Problem>,
}

impl From<v1::ResourceOutcome> for ResourceOutcome {
    fn from(outcome: v1::ResourceOutcome) -> Self {
        Self {
            container: outcome.container,
            resource: outcome.resource,
            devices: outcome.device_ids,
            outcome: outcome.outcome,
            problem: outcome.problem.map(Into::into),
        }
    }
}

#[derive(Serialize)]
struct ClaimOutcome {
    namespace: String,
    name: String,
    uid: String,
    outcome: String,
    problem: Option<Problem>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Problem {
    kind: String,
    code: String,
    message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_after_ms: Option<u32>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    details: BTreeMap<String, String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(in super::super) struct Container {
    name: String,
    pub(in super::super) cdi_devices: Vec<String>,
    env: BTreeMap<String, String>,
    mounts: Vec<Mount>,
    device_nodes: Vec<DeviceNode>,
    annotations: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    conflicts: Vec<String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Mount {
    host_path: String,
    container_path: String,
    read_only: bool,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct DeviceNode {
    host_path: String,
    container_path: String,
    permissions: String,
}

impl From<v1::ContainerDevices> for Container {
    fn from(container: v1::ContainerDevices) -> Self {
        let mount = |m: v1::Mount| Mount {
            host_path: m.host_path,
            container_path: m.container_path,
            read_only: m.read_only,
        };
        let node = |n: v1::DeviceNode| DeviceNode {
            host_path: n.host_path,
            container_path: n.container_path,
            permissions: n.permissions,
        };
        Self {
            name: container.name,
            cdi_devices: container.cdi_devices,
            env: container.env,
            mounts: container.mounts.into_iter().map(mount).collect(),
            device_nodes: container.device_nodes.into_iter().map(node).collect(),
            annotations: container.annotations,
            conflicts: container.conflicts,
        }
    }
}

impl From<v1::Problem> for Problem {
    fn from(problem: v1::Problem) -> Self {
        Self {
            kind: problem.kind,
            code: problem.code,
            message: problem.message,
            retry_after_ms: problem.retry_after_ms,
            details: problem.details,
        }
    }
}

impl From<v1::ClaimOutcome> for ClaimOutcome {
    fn from(outcome: v1::ClaimOutcome) -> Self {
        let id = outcome.id.unwrap_or_default();
        Self {
            namespace: id.namespace,
            name: id.name,
            uid: id.uid,
            outcome: outcome.outcome,
            problem: outcome.problem.map(Into::into),
        }
    }
}

/// Prints the answers: one as an object, several as an array. What is refused makes the command fail.
pub(super) fn finish(answers: &[Answer], format: Format) -> Result<Outcome> {
    match (answers, format) {
        (_, Format::Table | Format::Wide) => tables(answers, format)?,
        ([one], _) => print(format, one, || claim_rows(answers), "")?,
        _ => print(format, &answers, || claim_rows(answers), "")?,
    }
    let mut refused = false;
    for words in answers.iter().flat_map(refusals) {
        refused = true;
        eprintln!("error: {words}");
    }
    Ok(if refused { Outcome::Refused } else { Outcome::Done })
}

fn tables(answers: &[Answer], format: Format) -> Result<()> {
    let no_claims = answers.iter().all(|answer| answer.claims.is_empty());
    let no_resources = answers.iter().all(|answer| answer.resources.is_empty());
    match (no_claims, no_resources) {
        (true, true) => say("the pod holds no claims")?,
        (true, false) => {}
        (false, _) => print(format, &(), || claim_rows(answers), "")?,
    }
    if !no_resources {
        print(format, &(), || resource_rows(answers), "")?;
    }
    let containers = answers.iter().filter_map(|answer| answer.containers.as_ref()).flatten();
    for container in containers {
        for line in needs(container) {
            say(&format!("container {}: {}", container.name, printable(&line)))?;
        }
        for conflict in &container.conflicts {
            eprintln!("warning: container {}: {}", container.name, printable(conflict));
        }
    }
    Ok(())
}

/// What a runtime needs for a container, line by line.
fn needs(container: &Container) -> Vec<String> {
    let mut lines = container.cdi_devices.clone();
    lines.extend(container.env.iter().map(|(name, value)| format!("env {name}={value}")));
    lines.extend(container.mounts.iter().map(|mount| {
        let how = if mount.read_only { "ro" } else { "rw" };
        format!("mount {}:{}:{how}", mount.host_path, mount.container_path)
    }));
    lines.extend(
        container
            .device_nodes
            .iter()
            .map(|node| format!("device {}:{}:{}", node.host_path, node.container_path, node.permissions)),
    );
    lines.extend(container.annotations.iter().map(|(key, value)| format!("annotation {key}={value}")));
    lines
}

/// What was refused, in words.
fn refusals(answer: &Answer) -> impl Iterator<Item = String> {
    let claims = answer.claims.iter().filter(|claim| claim.outcome == "refused").map(|claim| {
        let name = format!("{}/{}", claim.namespace, claim.name);
        said(&format!("claim {name}"), &name, claim.problem.as_ref())
    });
    let resources = answer.resources.iter().filter(|resource| resource.outcome == "refused").map(|refused| {
        let about = format!("container {}, {}", refused.container, refused.resource);
        said(&about, &refused.resource, refused.problem.as_ref())
    });
    claims.chain(resources).chain(answer.failed.iter().map(|words| printable(words)))
}

/// Most problems name what they are about by themselves.
fn said(about: &str, name: &str, problem: Option<&Problem>) -> String {
    let Some(problem) = problem else { return format!("{about} is refused") };
    let message = printable(&problem.message);
    let about = if message.contains(name) { String::new() } else { format!("{about}: ") };
    format!("{about}{message} ({}, {})", problem.kind, problem.code)
}

fn claim_rows(answers: &[Answer]) -> Rows {
    let row = |answer: &Answer, claim: &ClaimOutcome| {
        let name = format!("{}/{}", claim.namespace, claim.name);
        vec![answer.name(), name, claim.outcome.clone(), claim.uid.clone()]
    };
    let of_answer =
        |answer: &Answer| answer.claims.iter().map(|claim| row(answer, claim)).collect::<Vec<_>>();
    Rows {
        heading: vec!["POD", "CLAIM", "OUTCOME", "UID"],
        wide_from: 3,
        rows: answers.iter().flat_map(of_answer).collect(),
    }
}

fn resource_rows(answers: &[Answer]) -> Rows {
    let row = |answer: &Answer, resource: &ResourceOutcome| {
        let (container, name) = (resource.container.clone(), resource.resource.clone());
        vec![answer.name(), container, name, resource.outcome.clone(), resource.devices.join(",")]
    };
    let of_answer = |answer: &Answer| answer.resources.iter().map(|r| row(answer, r)).collect::<Vec<_>>();
    Rows {
        heading: vec!["POD", "CONTAINER", "RESOURCE", "OUTCOME", "DEVICES"],
        wide_from: 5,
        rows: answers.iter().flat_map(of_answer).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(message: &str) -> v1::Problem {
        let (kind, code) = ("conflict".to_owned(), "device-held".to_owned());
        v1::Problem { kind, code, message: message.to_owned(), ..v1::Problem::default() }
    }

    fn resource(outcome: &str, problem: Option<v1::Problem>) -> v1::ResourceOutcome {
        v1::ResourceOutcome {
            container: "main".to_owned(),
            resource: "a.dev/a".to_owned(),
            device_ids: vec!["0".to_owned(), "1".to_owned()],
            outcome: outcome.to_owned(),
            problem,
        }
    }

    fn answer(resources: Vec<v1::ResourceOutcome>, failed: Vec<String>) -> Answer {
        let claim = v1::ClaimOutcome {
            id: Some(v1::ObjectRef {
                namespace: "default".to_owned(),
                name: "c".to_owned(),
                uid: "u".to_owned(),
            }),
            outcome: "refused".to_owned(),
            problem: Some(problem("claim default/c is another's")),
        };
        let response = v1::PreparePodResponse { claims: vec![claim], resources, ..Default::default() };
        Answer::prepared(response, failed)
    }

    #[test]
    fn everything_that_is_refused_is_said_once_with_what_it_is_about() {
        let resources =
            vec![resource("refused", Some(problem("none is\u{1b}[2J free"))), resource("allocated", None)];
        let words: Vec<_> =
            refusals(&answer(resources, vec!["container main: not now".to_owned()])).collect();
        let expected = [
            "claim default/c is another's (conflict, device-held)",
            "container main, a.dev/a: none is\u{fffd}[2J free (conflict, device-held)",
            "container main: not now",
        ];
        assert_eq!(words, expected);
    }

    #[test]
    fn resources_have_a_table_of_their_own_and_no_place_in_an_answer_without() {
        let with = answer(vec![resource("allocated", None)], vec![]);
        assert_eq!(
            resource_rows(std::slice::from_ref(&with)).rows[0][1..],
            ["main", "a.dev/a", "allocated", "0,1"]
        );
        let json = serde_json::to_value(&with).unwrap();
        let expected = serde_json::json!([{"container": "main", "resource": "a.dev/a", "devices": ["0", "1"], "outcome": "allocated"}]);
        assert_eq!(json["resources"], expected);
        let without = serde_json::to_value(answer(vec![], vec![])).unwrap();
        assert!(without.get("resources").is_none(), "{without}");
    }

    #[test]
    fn a_container_is_told_everything_that_its_runtime_needs() {
        let one = |name: &str, value: &str| BTreeMap::from([(name.to_owned(), value.to_owned())]);
        let container = Container::from(v1::ContainerDevices {
            name: "main".to_owned(),
            cdi_devices: vec!["v/c=0".to_owned()],
            env: one("A", "1"),
            mounts: vec![v1::Mount {
                host_path: "/h".to_owned(),
                container_path: "/c".to_owned(),
                read_only: true,
            }],
            device_nodes: vec![v1::DeviceNode {
                host_path: "/dev/h".to_owned(),
                container_path: "/dev/c".to_owned(),
                permissions: "rw".to_owned(),
            }],
            annotations: one("k", "v"),
            conflicts: vec![],
        });
        let expected = ["v/c=0", "env A=1", "mount /h:/c:ro", "device /dev/h:/dev/c:rw", "annotation k=v"];
        assert_eq!(needs(&container), expected);
    }
}
