package main

import (
	"net/http"
	"path"
)

type roundTripper func(*http.Request) (*http.Response, error)

func (r roundTripper) RoundTrip(request *http.Request) (*http.Response, error) {
	return r(request)
}

// recorded prints each request that was answered.
func recorded(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(request *http.Request) (*http.Response, error) {
		response, err := next.RoundTrip(request)
		if err == nil {
			query := map[string]string{}
			for name := range request.URL.Query() {
				query[name] = request.URL.Query().Get(name)
			}
			resource := path.Base(request.URL.Path)
			event{Event: "request", Resource: resource, Query: query, Status: response.StatusCode}.print()
		}
		return response, err
	})
}
