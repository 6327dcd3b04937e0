//! The admin socket: raw HTTP, and a parser of OpenMetrics text that takes nothing that the standard does not allow.

use std::collections::{BTreeMap, BTreeSet};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::{DEADLINE, Root};

/// An answer to a request.
#[derive(Debug)]
pub struct HttpAnswer {
    pub status: u16,
    /// With lower-case names.
    pub headers: BTreeMap<String, String>,
    pub body: String,
}

impl Root {
    /// Asks the admin socket.
    pub async fn admin(&self, method: &str, path: &str) -> HttpAnswer {
        let socket = self.path().join("run/nodedock/admin.sock");
        let stream = UnixStream::connect(socket).await.expect("the admin socket accepts");
        ask(stream, method, path).await
    }

    /// What the daemon measures now.
    pub async fn metrics(&self) -> Exposition {
        let answer = self.admin("GET", "/metrics").await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        let kind = answer.headers["content-type"].as_str();
        assert_eq!(kind, "application/openmetrics-text; version=1.0.0; charset=utf-8");
        Exposition::parse(&answer.body).unwrap_or_else(|why| panic!("{why}\n{}", answer.body))
    }
}

/// One request on a connection of its own.
pub async fn ask(mut stream: impl AsyncRead + AsyncWrite + Unpin, method: &str, path: &str) -> HttpAnswer {
    let request = format!("{method} {path} HTTP/1.1\r\nHost: nodedock\r\n\r\n");
    let mut text = String::new();
    let exchange = async {
        stream.write_all(request.as_bytes()).await?;
        stream.read_to_string(&mut text).await
    };
    timeout(DEADLINE, exchange).await.expect("an answer in time").expect("an answer");
    let (head, body) = text.split_once("\r\n\r\n").expect("headers end");
    let mut lines = head.lines();
    let status = lines.next().and_then(|line| line.split(' ').nth(1)).expect("a status line");
    let header =
        |line: &str| line.split_once(": ").map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()));
    HttpAnswer {
        status: status.parse().expect("a status"),
        headers: lines.filter_map(header).collect(),
        body: body.to_owned(),
    }
}

pub type Labels = BTreeMap<String, String>;

/// Families of metrics and their samples.
#[derive(Debug, Default)]
pub struct Exposition {
    /// Kind by name, in the order of the text.
    pub families: Vec<(String, String)>,
    samples: BTreeMap<(String, Labels), f64>,
}

impl Exposition {
    /// The value of a sample; its labels are those given and no others.
    pub fn value(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let labels = labels.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        self.samples.get(&(name.to_owned(), labels)).copied()
    }

    /// Every sample that has a label of this value.
    pub fn with(&self, label: &str, value: &str) -> Vec<&str> {
        let has = |(_, labels): &&(String, Labels)| labels.get(label).is_some_and(|known| known == value);
        self.samples.keys().filter(has).map(|(name, _)| name.as_str()).collect()
    }

    pub fn parse(text: &str) -> Result<Self, String> {
        let body = text.strip_suffix("# EOF\n").ok_or("it does not end with # EOF")?;
        let mut found = Self::default();
        let mut helped = None;
        for (number, line) in body.lines().enumerate() {
            let at = |why: String| format!("line {}: {why}: {line}", number + 1);
            if let Some(rest) = line.strip_prefix("# HELP ") {
                let (name, help) = rest.split_once(' ').ok_or_else(|| at("no help".into()))?;
                check(!help.is_empty(), "empty help").map_err(at)?;
                helped = Some(name.to_owned());
            } else if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').ok_or_else(|| at("no kind".into()))?;
                check(helped.take().as_deref() == Some(name), "HELP is of another").map_err(at)?;
                found.family(name, kind).map_err(at)?;
            } else {
                found.sample(line).map_err(at)?;
            }
        }
        found.check_histograms()?;
        Ok(found)
    }

    fn family(&mut self, name: &str, kind: &str) -> Result<(), String> {
        check(is_name(name), "no name of a metric")?;
        check(matches!(kind, "counter" | "gauge" | "histogram"), "no kind of ours")?;
        check(self.families.iter().all(|(known, _)| known != name), "the family occurs twice")?;
        self.families.push((name.to_owned(), kind.to_owned()));
        Ok(())
    }

    fn sample(&mut self, line: &str) -> Result<(), String> {
        let (family, kind) = self.families.last().ok_or("a sample before every family")?;
        let end = line.find(['{', ' ']).ok_or("no value")?;
        let (name, rest) = line.split_at(end);
        let suffix = name.strip_prefix(family.as_str()).ok_or("a sample of another family")?;
        let fits = match kind.as_str() {
            "counter" => suffix == "_total",
            "gauge" => suffix.is_empty(),
            _ => matches!(suffix, "_bucket" | "_sum" | "_count"),
        };
        check(fits, "the suffix does not fit the kind")?;
        let (labels, value) = labels(rest)?;
        let value: f64 = value.strip_prefix(' ').ok_or("no value")?.parse().map_err(|_| "no number")?;
        check(kind == "gauge" || value >= 0.0, "less than nothing")?;
        let twice = self.samples.insert((name.to_owned(), labels), value).is_some();
        check(!twice, "the sample occurs twice")
    }

    /// Buckets ascend, and the last has as many as the count.
    fn check_histograms(&self) -> Result<(), String> {
        let mut buckets: BTreeMap<(String, Labels), Vec<(f64, f64)>> = BTreeMap::new();
        for ((name, labels), value) in &self.samples {
            let Some(family) = name.strip_suffix("_bucket") else { continue };
            let mut labels = labels.clone();
            let bound = labels.remove("le").ok_or_else(|| format!("{name}: a bucket without le"))?;
            let bound = bound.replace("+Inf", "inf").parse().map_err(|_| format!("{name}: le={bound}"))?;
            buckets.entry((family.to_owned(), labels)).or_default().push((bound, *value));
        }
        for ((family, labels), mut buckets) in buckets {
            buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
            let ascend = buckets.windows(2).all(|pair| pair[0].1 <= pair[1].1);
            let count = self.samples.get(&(format!("{family}_count"), labels.clone()));
            let last = buckets.last().filter(|(bound, _)| bound.is_infinite()).map(|(_, value)| value);
            check(ascend && count.is_some() && last == count, &format!("{family} {labels:?}: {buckets:?}"))?;
        }
        Ok(())
    }
}

fn check(holds: bool, why: &str) -> Result<(), String> {
    if holds { Ok(()) } else { Err(why.to_owned()) }
}

fn is_name(text: &str) -> bool {
    let first = text.bytes().next().is_some_and(|b| b.is_ascii_alphabetic() || b == b'_');
    first && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

/// `{a="x",b="y"}`, and what follows it.
fn labels(text: &str) -> Result<(Labels, &str), String> {
    let mut found = Labels::new();
    let Some(mut rest) = text.strip_prefix('{') else { return Ok((found, text)) };
    loop {
        let (name, after) = rest.split_once("=\"").ok_or("no label")?;
        check(is_name(name), "no name of a label")?;
        let (value, after) = quoted(after)?;
        check(found.insert(name.to_owned(), value).is_none(), "a label occurs twice")?;
        if let Some(after) = after.strip_prefix('}') {
            return Ok((found, after));
        }
        rest = after.strip_prefix(',').ok_or("no comma between labels")?;
    }
}

/// The rest of a quoted text, without its escapes, and what follows it.
fn quoted(text: &str) -> Result<(String, &str), String> {
    let (mut value, mut chars) = (String::new(), text.char_indices());
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Ok((value, &text[at + 1..])),
            '\\' => value.push(match chars.next() {
                Some((_, 'n')) => '\n',
                Some((_, c @ ('\\' | '"'))) => c,
                _ => return Err("no escape".to_owned()),
            }),
            c => value.push(c),
        }
    }
    Err("the quotes do not end".to_owned())
}

/// Names of the families on the page for people, with those of their samples.
pub fn families_on_page() -> BTreeSet<String> {
    let page = include_str!("../../docs/metrics.md");
    let row = |line: &str| Some(line.strip_prefix("| `")?.split_once('`')?.0.to_owned());
    page.lines().filter_map(row).filter(|name| is_name(name)).collect()
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
    fn what_the_standard_does_not_allow_is_refused() {
        for (from, to) in [
            ("# EOF\n", ""),
            ("b_total", "b"),
            ("# TYPE b counter", "# TYPE c counter"),
            ("# TYPE b counter", "# TYPE b number"),
            ("le=\"+Inf\"} 2", "le=\"+Inf\"} 3"),
            ("le=\"1.0\"} 1", "le=\"1.0\"} 5"),
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
