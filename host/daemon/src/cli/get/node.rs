//! `nodedock get node`, and the warning of every other `nodedock get`.

use std::collections::BTreeMap;
use std::io::Write;

use anyhow::Result;
use nodedock_proto::node::v1;
use serde::Serialize;

use super::super::Place;
use super::super::client::{Client, said};
use super::super::output::{Format, Rows, print, say};
use super::GetArgs;
use nodedock_base::clock::rfc3339;

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Node {
    name: String,
    boot_id: String,
    version: String,
    started_ms: u64,
    drivers_serving: u32,
    claims: BTreeMap<String, u32>,
    pods: u32,
    conditions: Vec<Condition>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Condition {
    subject: String,
    code: String,
    message: String,
    details: BTreeMap<String, String>,
    since_ms: u64,
}

impl From<v1::NodeStatus> for Node {
    fn from(node: v1::NodeStatus) -> Self {
        Self {
            name: node.name,
            boot_id: node.boot_id,
            version: node.version,
            started_ms: node.started_ms,
            drivers_serving: node.drivers_serving,
            claims: node.claims.into_iter().collect(),
            pods: node.pods,
            conditions: node.conditions.into_iter().map(Into::into).collect(),
        }
    }
}

impl From<v1::Condition> for Condition {
    fn from(condition: v1::Condition) -> Self {
        let problem = condition.problem.unwrap_or_default();
        Self {
            subject: condition.subject,
            code: problem.code,
            message: problem.message,
            details: problem.details.into_iter().collect(),
            since_ms: condition.since_ms,
        }
    }
}

/// Prints the node, and under it what is wrong. False: it is not the node that was asked for.
pub(super) async fn show(client: &mut Client, place: &Place, args: &GetArgs) -> Result<bool> {
    let node = client.get_node(v1::GetNodeRequest {}).await.map_err(said(place))?.into_inner();
    let node = Node::from(node);
    if args.name.as_ref().is_some_and(|name| *name != node.name) {
        return Ok(false);
    }
    print(args.output, &node, || node_row(&node), "")?;
    if matches!(args.output, Format::Table | Format::Wide) {
        say("")?;
        print(args.output, &(), || condition_rows(&node.conditions), "nothing is wrong with the node")?;
    }
    Ok(true)
}

fn node_row(node: &Node) -> Rows {
    let claims: Vec<_> = node.claims.iter().map(|(state, count)| format!("{count} {state}")).collect();
    let row = vec![
        node.name.clone(),
        node.version.clone(),
        rfc3339(node.started_ms),
        node.drivers_serving.to_string(),
        if claims.is_empty() { "0".to_owned() } else { claims.join(", ") },
        node.pods.to_string(),
        node.conditions.len().to_string(),
        node.boot_id.clone(),
    ];
    Rows {
        heading: vec!["NAME", "VERSION", "STARTED", "DRIVERS", "CLAIMS", "PODS", "PROBLEMS", "BOOT ID"],
        wide_from: 7,
        rows: vec![row],
    }
}

fn condition_rows(conditions: &[Condition]) -> Rows {
    let row = |condition: &Condition| {
        vec![
            rfc3339(condition.since_ms),
            condition.code.clone(),
            condition.subject.clone(),
            condition.message.clone(),
        ]
    };
    Rows {
        heading: vec!["SINCE", "CODE", "SUBJECT", "PROBLEM"],
        wide_from: 4,
        rows: conditions.iter().map(row).collect(),
    }
}

/// One line on standard error where something is wrong with the node. What cannot be asked is not warned of.
pub(super) async fn warn(client: &mut Client) {
    let Ok(node) = client.get_node(v1::GetNodeRequest {}).await else { return };
    let problems = match node.into_inner().conditions.len() {
        0 => return,
        1 => "1 problem".to_owned(),
        count => format!("{count} problems"),
    };
    // A closed standard error is nobody to tell.
    let _ = writeln!(std::io::stderr(), "warning: the node has {problems}: see nodedock get node");
}
