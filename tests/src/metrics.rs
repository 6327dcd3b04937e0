//! The admin socket: raw HTTP, and a parser of OpenMetrics text. The library that writes it is trusted with buckets.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use regex::Regex;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::{DEADLINE, Root};

/// An answer to a request.
#[derive(Debug)]
pub struct HttpAnswer {
    pub status: u16,
    /// Headers with lower-case names.
    pub headers: BTreeMap<String, String>,
    pub body: String,
}

impl Root {
    /// Asks the admin socket.
    pub async fn admin(&self, method: &str, path: &str) -> HttpAnswer {
        let socket = self.path().join("run/nodedock/admin.sock");
        let stream = UnixStream::connect(socket)
            .await
            .expect("the admin socket accepts");
        ask(stream, method, path).await
    }

    /// Returns the daemon's current metrics.
    pub async fn metrics(&self) -> Exposition {
        let answer = self.admin("GET", "/metrics").await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        let kind = answer.headers["content-type"].as_str();
        assert_eq!(
            kind,
            "application/openmetrics-text; version=1.0.0; charset=utf-8"
        );
        Exposition::parse(&answer.body).unwrap_or_else(|why| panic!("{why}\n{}", answer.body))
    }
}

/// One request on a connection of its own.
pub async fn ask(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    method: &str,
    path: &str,
) -> HttpAnswer {
    let request = format!("{method} {path} HTTP/1.1\r\nHost: nodedock\r\n\r\n");
    let mut text = String::new();
    let exchange = async {
        stream.write_all(request.as_bytes()).await?;
        stream.read_to_string(&mut text).await
    };
    timeout(DEADLINE, exchange)
        .await
        .expect("an answer in time")
        .expect("an answer");
    let (head, body) = text.split_once("\r\n\r\n").expect("headers end");
    let mut lines = head.lines();
    let status = lines
        .next()
        .and_then(|line| line.split(' ').nth(1))
        .expect("a status line");
    let header = |line: &str| {
        line.split_once(": ")
            .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
    };
    HttpAnswer {
        status: status.parse().expect("a status"),
        headers: lines.filter_map(header).collect(),
        body: body.to_owned(),
    }
}

pub type Labels = BTreeMap<String, String>;

#[derive(Debug)]
pub struct Family {
    pub name: String,
    pub kind: String,
    pub samples: BTreeMap<(String, Labels), f64>,
}

/// Families of metrics, in the order of the text.
#[derive(Debug, Default)]
pub struct Exposition {
    pub families: Vec<Family>,
}

impl Exposition {
    /// The value of a sample; its labels are those given and no others.
    pub fn value(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let labels = labels
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        let sample = (name.to_owned(), labels);
        self.families
            .iter()
            .find_map(|family| family.samples.get(&sample).copied())
    }

    /// Every sample that has a label of this value.
    pub fn with(&self, label: &str, value: &str) -> Vec<&str> {
        let has =
            |(_, labels): &&(String, Labels)| labels.get(label).is_some_and(|known| known == value);
        let samples = self
            .families
            .iter()
            .flat_map(|family| family.samples.keys());
        samples.filter(has).map(|(name, _)| name.as_str()).collect()
    }

    /// Refuses what the standard does not allow.
    pub fn parse(text: &str) -> Result<Self, String> {
        let body = text
            .strip_suffix("# EOF\n")
            .ok_or("it does not end with # EOF")?;
        let (mut found, mut helped) = (Self::default(), None);
        for (number, line) in body.lines().enumerate() {
            let is_valid = match Vec::from_iter(line.splitn(4, ' ')).as_slice() {
                ["#", "HELP", name, help] => helped.replace(*name).is_none() && !help.is_empty(),
                ["#", "TYPE", name, kind] => {
                    helped.take() == Some(*name) && found.family(name, kind)
                }
                _ => helped.is_none() && found.sample(line).is_some(),
            };
            is_valid
                .then_some(())
                .ok_or_else(|| format!("line {}: {line}", number + 1))?;
        }
        Ok(found)
    }

    /// False: no family of ours, or one that occurs twice.
    fn family(&mut self, name: &str, kind: &str) -> bool {
        let is_new = self.families.iter().all(|known| known.name != name);
        self.families.push(Family {
            name: name.to_owned(),
            kind: kind.to_owned(),
            samples: BTreeMap::new(),
        });
        is_new && is_name(name) && matches!(kind, "counter" | "gauge" | "histogram")
    }

    /// None: no sample of the last family, or one that occurs twice.
    fn sample(&mut self, line: &str) -> Option<()> {
        let Family {
            name,
            kind,
            samples,
        } = self.families.last_mut()?;
        let parts = SAMPLE.captures(line)?;
        let suffix = parts[1].strip_prefix(name.as_str())?;
        let fits = match kind.as_str() {
            "counter" => suffix == "_total",
            "gauge" => suffix.is_empty(),
            _ => matches!(suffix, "_bucket" | "_sum" | "_count"),
        };
        let mut labels = Labels::new();
        for label in LABEL.captures_iter(parts.get(2).map_or("", |labels| labels.as_str())) {
            let value = label[2]
                .replace("\\\"", "\"")
                .replace("\\n", "\n")
                .replace("\\\\", "\\");
            labels
                .insert(label[1].to_owned(), value)
                .is_none()
                .then_some(())?;
        }
        let value: f64 = parts[3]
            .parse()
            .ok()
            .filter(|value| kind == "gauge" || *value >= 0.0)?;
        let is_new = samples
            .insert((parts[1].to_owned(), labels), value)
            .is_none();
        (fits && is_new).then_some(())
    }
}

/// A name, labels and a value.
static SAMPLE: LazyLock<Regex> = LazyLock::new(|| {
    let label = r#"[A-Za-z_]\w*="(?:[^"\\]|\\["\\n])*""#;
    Regex::new(&format!(
        r"^([A-Za-z_]\w*)(?:\{{({label}(?:,{label})*)\}})? (\S+)$"
    ))
    .expect("a regular expression")
});
static LABEL: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r#"(\w+)="((?:[^"\\]|\\.)*)""#).expect("a regular expression"));

fn is_name(text: &str) -> bool {
    let first = text
        .bytes()
        .next()
        .is_some_and(|b| b.is_ascii_alphabetic() || b == b'_');
    first && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

/// Names of the families on the page for people, with those of their samples.
pub fn families_on_page() -> BTreeSet<String> {
    let page = include_str!("../../docs/metrics.md");
    let row = |line: &str| Some(line.strip_prefix("| `")?.split_once('`')?.0.to_owned());
    page.lines()
        .filter_map(row)
        .filter(|name| is_name(name))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "# HELP a_seconds A.\n# TYPE a_seconds histogram\na_seconds_sum{x=\"y\"} 1.5\n\
        a_seconds_count{x=\"y\"} 2\na_seconds_bucket{x=\"y\",le=\"1.0\"} 1\na_seconds_bucket{x=\"y\",le=\"+Inf\"} 2\n\
        # HELP b B.\n# TYPE b counter\nb_total{p=\"a\\\\b\\\"c\"} 3\n# EOF\n";

    #[test]
    fn a_good_text_is_read() {
        let found = Exposition::parse(GOOD).unwrap();
        assert_eq!(found.value("b_total", &[("p", "a\\b\"c")]), Some(3.0));
        assert_eq!(found.value("a_seconds_count", &[("x", "y")]), Some(2.0));
        assert_eq!(found.with("x", "y").len(), 4);
    }

    #[test]
    fn invalid_expositions_are_refused() {
        for (from, to) in [
            ("# EOF\n", ""),
            ("b_total", "b"),
            ("# TYPE b counter", "# TYPE c counter"),
            ("# TYPE b counter", "# TYPE b number"),
            ("} 3", "} three"),
            ("} 3", "} -3"),
            ("} 3\n", "} 3\nb_total{p=\"a\\\\b\\\"c\"} 3\n"),
            ("\\\"c", "\\xc"),
            ("# HELP b B.\n", ""),
        ] {
            let bad = GOOD.replacen(from, to, 1);
            assert!(Exposition::parse(&bad).is_err(), "{bad}");
        }
    }
}
