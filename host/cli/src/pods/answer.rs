//! Prints the answers about pods.

use anyhow::Result;
use nodedock_proto::node::v1;
use serde::Serialize;

use super::super::output::{Column, Format, Row, join, print, print_error, printable, table};
use super::super::{CommandError, describe};

#[derive(Serialize)]
pub(super) struct PodOutput {
    pod: Option<v1::ObjectRef>,
    claims: Vec<v1::ClaimOutcome>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    resources: Vec<v1::ResourceOutcome>,
    #[serde(skip_serializing_if = "Option::is_none")]
    containers: Option<Vec<v1::ContainerDevices>>,
    #[serde(rename = "cdiDirectories", skip_serializing_if = "Vec::is_empty")]
    cdi_directories: Vec<String>,
    /// Why containers cannot start.
    #[serde(skip)]
    failed: Vec<String>,
}

impl PodOutput {
    pub(super) fn prepared(answer: v1::PreparePodResponse, failed: Vec<String>) -> Self {
        let v1::PreparePodResponse {
            pod,
            claims,
            containers,
            resources,
            cdi_directories,
        } = answer;
        Self {
            pod,
            claims,
            resources,
            containers: Some(containers),
            cdi_directories,
            failed,
        }
    }

    pub(super) fn unprepared(answer: v1::UnpreparePodResponse) -> Self {
        let v1::UnpreparePodResponse {
            pod,
            claims,
            resources,
        } = answer;
        Self {
            pod,
            claims,
            resources,
            containers: None,
            cdi_directories: Vec::new(),
            failed: Vec::new(),
        }
    }
}

/// Prints the answers: one as an object, several as an array. A refusal makes the command fail.
pub(super) fn finish(answers: &[PodOutput], format: Format) -> Result<()> {
    match answers {
        [one] => print(format, one, || text(answers, format))?,
        _ => print(format, &answers, || text(answers, format))?,
    }
    if matches!(format, Format::Table | Format::Wide) {
        for container in containers(answers) {
            for conflict in &container.conflicts {
                print_error(&format!(
                    "warning: container {}: {conflict}",
                    container.name
                ));
            }
        }
    }
    let refusals: Vec<_> = answers.iter().flat_map(refusals).collect();
    refusals
        .iter()
        .for_each(|refusal| print_error(&format!("error: {refusal}")));
    CommandError::unless_done(refusals.is_empty())
}

fn text(answers: &[PodOutput], format: Format) -> String {
    let (mut claims, mut resources) = (Vec::new(), Vec::new());
    for answer in answers {
        let pod = answer.pod.as_ref().map(describe::name).unwrap_or_default();
        claims.extend(
            answer
                .claims
                .iter()
                .map(|claim| (pod.clone(), claim.clone())),
        );
        resources.extend(
            answer
                .resources
                .iter()
                .map(|resource| (pod.clone(), resource.clone())),
        );
    }
    let mut parts = Vec::new();
    if !claims.is_empty() || resources.is_empty() {
        parts.push(table(format, &claims, "the pod has no claims"));
    }
    if !resources.is_empty() {
        parts.push(table(format, &resources, ""));
    }
    parts.extend(
        containers(answers)
            .flat_map(|container| {
                let name = container.name.clone();
                needs(container)
                    .into_iter()
                    .map(move |line| format!("container {name}: {line}"))
            })
            .map(|line| join([line])),
    );
    parts.join("\n")
}

fn containers(answers: &[PodOutput]) -> impl Iterator<Item = &v1::ContainerDevices> {
    answers
        .iter()
        .filter_map(|answer| answer.containers.as_ref())
        .flatten()
}

/// Returns the settings that a runtime needs for a container, one per line.
fn needs(container: &v1::ContainerDevices) -> Vec<String> {
    let mut lines = container.cdi_devices.clone();
    lines.extend(
        container
            .env
            .iter()
            .map(|(name, value)| format!("env {name}={value}")),
    );
    lines.extend(container.mounts.iter().map(|mount| {
        let mode = if mount.read_only { "ro" } else { "rw" };
        format!("mount {}:{}:{mode}", mount.host_path, mount.container_path)
    }));
    lines.extend(container.device_nodes.iter().map(|node| {
        format!(
            "device {}:{}:{}",
            node.host_path, node.container_path, node.permissions
        )
    }));
    lines.extend(
        container
            .annotations
            .iter()
            .map(|(key, value)| format!("annotation {key}={value}")),
    );
    lines
}

/// The errors of everything that was refused.
fn refusals(answer: &PodOutput) -> impl Iterator<Item = String> {
    let claims = answer
        .claims
        .iter()
        .filter(|claim| claim.outcome == "refused")
        .map(|claim| {
            let name = claim.id.as_ref().map(describe::name).unwrap_or_default();
            refusal(&format!("claim {name}"), &name, &claim.problem)
        });
    let resources = answer
        .resources
        .iter()
        .filter(|resource| resource.outcome == "refused")
        .map(|refused| {
            let about = format!("container {}, {}", refused.container, refused.resource);
            refusal(&about, &refused.resource, &refused.problem)
        });
    claims
        .chain(resources)
        .chain(answer.failed.iter().map(|error| printable(error)))
}

/// Most problems name what they are about by themselves.
fn refusal(about: &str, name: &str, problem: &Option<v1::Problem>) -> String {
    let Some(problem) = problem else {
        return format!("{about} is refused");
    };
    let message = printable(&problem.message);
    let about = if message.contains(name) {
        String::new()
    } else {
        format!("{about}: ")
    };
    format!("{about}{message} ({}, {})", problem.kind, problem.code)
}

/// A pod's name, and the outcome of one of its claims.
impl Row for (String, v1::ClaimOutcome) {
    const COLUMNS: &'static [Column<Self>] = &[
        ("POD", |(pod, _)| pod.clone()),
        ("CLAIM", |(_, claim)| {
            claim.id.as_ref().map(describe::name).unwrap_or_default()
        }),
        ("OUTCOME", |(_, claim)| claim.outcome.clone()),
        ("UID", |(_, claim)| claim.id.clone().unwrap_or_default().uid),
    ];
    const NARROW: usize = 3;
}

/// A pod's name, and the outcome of a resource of one of its containers.
impl Row for (String, v1::ResourceOutcome) {
    const COLUMNS: &'static [Column<Self>] = &[
        ("POD", |(pod, _)| pod.clone()),
        ("CONTAINER", |(_, of)| of.container.clone()),
        ("RESOURCE", |(_, of)| of.resource.clone()),
        ("OUTCOME", |(_, of)| of.outcome.clone()),
        ("DEVICES", |(_, of)| of.device_ids.join(",")),
    ];
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn problem(message: &str) -> v1::Problem {
        let (kind, code) = ("conflict".to_owned(), "device-held".to_owned());
        v1::Problem {
            kind,
            code,
            message: message.to_owned(),
            ..v1::Problem::default()
        }
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

    fn answer(resources: Vec<v1::ResourceOutcome>, failed: Vec<String>) -> PodOutput {
        let claim = v1::ClaimOutcome {
            id: Some(v1::ObjectRef {
                namespace: "default".to_owned(),
                name: "c".to_owned(),
                uid: "u".to_owned(),
            }),
            outcome: "refused".to_owned(),
            problem: Some(problem("claim default/c is another's")),
        };
        let response = v1::PreparePodResponse {
            claims: vec![claim],
            resources,
            ..Default::default()
        };
        PodOutput::prepared(response, failed)
    }

    #[test]
    fn each_refusal_is_printed_once() {
        let resources = vec![
            resource("refused", Some(problem("none is\u{1b}[2J free"))),
            resource("allocated", None),
        ];
        let errors: Vec<_> = refusals(&answer(
            resources,
            vec!["container main: not now".to_owned()],
        ))
        .collect();
        let expected = [
            "claim default/c is another's (conflict, device-held)",
            "container main, a.dev/a: none is\u{fffd}[2J free (conflict, device-held)",
            "container main: not now",
        ];
        assert_eq!(errors, expected);
    }

    #[test]
    fn resources_are_a_separate_optional_table() {
        let with = answer(vec![resource("allocated", None)], vec![]);
        let text = text(std::slice::from_ref(&with), Format::Table);
        let line = text
            .lines()
            .find(|line| line.contains("allocated"))
            .unwrap();
        assert_eq!(
            line.split_whitespace().collect::<Vec<_>>()[1..],
            ["a.dev/a", "allocated", "0,1"]
        );
        let json = serde_json::to_value(&with).unwrap();
        let expected = serde_json::json!([{"container": "main", "resource": "a.dev/a", "devices": ["0", "1"], "outcome": "allocated"}]);
        assert_eq!(json["resources"], expected);
        let without = serde_json::to_value(answer(vec![], vec![])).unwrap();
        assert!(without.get("resources").is_none(), "{without}");
    }

    #[test]
    fn text_has_everything_a_runtime_needs() {
        let one = |name: &str, value: &str| BTreeMap::from([(name.to_owned(), value.to_owned())]);
        let container = v1::ContainerDevices {
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
        };
        let expected = [
            "v/c=0",
            "env A=1",
            "mount /h:/c:ro",
            "device /dev/h:/dev/c:rw",
            "annotation k=v",
        ];
        assert_eq!(needs(&container), expected);
    }
}
