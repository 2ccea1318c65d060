"""Pictures of results; nothing here needs torch.

module    subject
charts    what a chart is: lines over sizes, or a matrix
results   records -> charts
axes      scales, ticks and their labels
svg       a chart as SVG
page      charts as one HTML page that needs nothing else
png       charts as one PNG, with matplotlib
write     files of either sort
"""
